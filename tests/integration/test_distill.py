"""The training loop and its recipe on tiny models: gradients (D11), exact resume (D14), launchers, verdicts (D15)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import distill.step
import distill.train
import recipes.distill
from distill.answers import open_answers
from distill.batches import Ints, Rows, check_rows
from distill.checkpoint import load_checkpoint, save_checkpoint
from distill.head import head_loss
from distill.mask_blocks import Parallel
from distill.settings import learning_rate
from distill.signals import get_signal, online
from distill.step import optimizer_of, optimizer_step, ready, window_gradients
from distill.student import freeze
from distill.train import Position, Settings, fit
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json, read_jsonl, write_json
from pairing.init import init_drafter
from pairing.pair import read_pair
from pairing.source import load_model, resolve
from recipes.config import guarded
from recipes.distill import main
from tests import tiny
from tests.conftest import ROOT
from tests.stored_answers import answered, made_up, store

RECIPE = ROOT / "recipes" / "distill.py"
WINDOWS = [[0, 1, 2, 3], [2], [1, 3]]  # a whole window, and two short ones as an epoch may end with
BASE: dict[str, Any] = {
    "seed": 0, "batch_size": 4, "accumulation": 1, "lr": 3e-3, "warmup": 0.1, "weight_decay": 0.0, "beta2": 0.98,
    "clip": 1.0,
    "trainable": "layers", "losses": {"forward_kl": 1.0, "cross_entropy": 0.1}, "chunk": 32, "epochs": None,
    "max_steps": None, "minutes": None, "eval_every": 1000, "eval_prompts": 8, "checkpoint_every": 1000, "keep": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ (its layers 0 and 3), train/ and held/ (its own answers), four/ (3, 50, 7, 120 answer tokens)."""
    place = tmp_path_factory.mktemp("place")
    target = tiny.folder(place / "target", layers=4)
    init_drafter(resolve(str(target)), place / "draft", [0, 3])
    store(place / "train", answered(target, 64, seed=1), target)
    store(place / "held", answered(target, 24, seed=2), target)
    store(place / "four", made_up([3, 50, 7, 120]), target)
    return place


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def rows_of(folder: Path) -> Rows:
    limits = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}
    return check_rows(open_answers(folder), "data", **limits)


# what a step may be made of that changes which positions there are, and so what it divides by
MODES: dict[str, dict[str, Any]] = {
    "cached": {},
    "online, on-policy": {"losses": {"jsd": 1.0}, "on_policy": 1.0},
    "masks": {"parallel": Parallel(4, tiny.REAL_TOKENS + 1, keep=0.8), "survival": "probabilistic"},
    "masks, online, on-policy": {"parallel": Parallel(3, tiny.REAL_TOKENS + 1), "losses": {"jsd": 1.0}, "on_policy": 1.0},
}  # fmt: skip


def gradients(
    accelerator: Accelerator, place: Path, window: Ints, batch_size: int, mode: str = "cached"
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The window's gradient by name, and the logged means, of the answers in `place`/four."""
    settings = Settings(**{**BASE, "batch_size": batch_size, "trainable": "all", "max_steps": 1, **MODES[mode]})
    model = load_model(place / "draft")
    params = freeze(model, settings.trainable)
    rows = rows_of(place / "four")
    target = online(load_model(place / "target"), "target", "cpu", "cpu") if "online" in mode else None
    run = ready(accelerator, model, rows, settings, get_signal(rows, target))
    stats = window_gradients(run, window, settings.losses, 0)  # type: ignore[arg-type]
    grads = {name: p.grad.clone() for name, p in params if p.grad is not None}
    assert len(grads) == len(params)
    return grads, torch.tensor(list(stats.values()))


# ---------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def two_ranks(place: Path) -> list[dict[str, torch.Tensor]]:
    """What each of two gloo processes has for every mode and window."""
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d"]
    words += ["--rdzv_endpoint", "localhost:0", "-m", "tests.integration.two_ranks", str(place)]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env=environment(), timeout=180)
    return [load_file(place / f"rank{r}.safetensors") for r in range(2)]


@pytest.mark.parametrize("mode", list(MODES))
def test_one_step_of_four_rows_equals_four_of_one_and_two_processes(
    place: Path, accelerator: Accelerator, two_ranks: list[dict[str, torch.Tensor]], mode: str
) -> None:
    """D11: 3, 50, 7 and 120 supervised tokens as 4x1, as 1x4 and over two gloo processes, short last windows too; also where
    the drafter writes the answers, or masks stand behind them."""
    for i, window in enumerate(WINDOWS):
        together, stats = gradients(accelerator, place, np.array(window), batch_size=4, mode=mode)
        apart, stats_apart = gradients(accelerator, place, np.array(window), batch_size=1, mode=mode)
        scale = max(float(g.abs().max()) for g in together.values())
        for name, g in together.items():
            for other in (apart[name], *(rank[f"{mode} {i} {name}"] for rank in two_ranks)):
                torch.testing.assert_close(other, g, rtol=1e-4, atol=1e-6 * scale)
        for other in (stats_apart, *(rank[f"{mode} {i} stats"] for rank in two_ranks)):
            torch.testing.assert_close(other, stats, rtol=1e-5, atol=1e-6)


def test_frozen_embedding_and_head_stay_bit_equal_and_layers_learn(
    place: Path, accelerator: Accelerator, tmp_path: Path
) -> None:
    model, before = load_model(place / "draft"), load_model(place / "draft").state_dict()
    fit(accelerator, model, rows_of(place / "train"), {}, Settings(**{**BASE, "max_steps": 3}), tmp_path)
    for name, tensor in model.state_dict().items():
        frozen = "embed_tokens" in name or "lm_head" in name
        assert torch.equal(tensor, before[name]) == frozen, name


# ---------------------------------------------------------------- schedule, budget, checkpoints


def test_the_rate_rises_then_falls_to_zero() -> None:
    settings = Settings(**{**BASE, "max_steps": 1, "lr": 1.0, "warmup": 0.1})
    rates = [learning_rate(settings, p) for p in (0, 0.05, 0.1, 0.55, 1)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert learning_rate(Settings(**{**BASE, "lr": 1.0, "warmup": 0.0}), 0) == 1


class Clock:
    """A monotonic clock that a test moves: every look takes 0.05 s."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.05
        return self.now


def test_a_budget_in_minutes_is_resumable_and_its_decay_ends(
    place: Path, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**{**BASE, "minutes": 0.1, "checkpoint_every": 5})
    rows = rows_of(place / "train")
    clock = Clock()
    monkeypatch.setattr(distill.train, "time", clock)
    step = optimizer_step

    def dies(run: Any, window: Ints, at: int, progress: float) -> dict[str, Any]:
        if at == 12:
            raise KeyboardInterrupt
        return step(run, window, at, progress)

    monkeypatch.setattr(distill.train, "optimizer_step", dies)
    with pytest.raises(KeyboardInterrupt):
        fit(accelerator, load_model(place / "draft"), rows, {}, settings, tmp_path)
    clock.now += 1e5  # time in between does not count
    monkeypatch.setattr(distill.train, "optimizer_step", step)
    summary = fit(accelerator, load_model(place / "draft"), rows, {}, settings, tmp_path)
    log = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in log] == list(range(1, summary["steps"] + 1))
    assert 5.9 < log[-1]["seconds"] < 6.3
    seconds = [row["seconds"] for row in log]
    assert max(np.diff(seconds)) < 0.3
    rates = [row["lr"] for row in log]
    assert max(rates) > 0.9 * settings.lr
    assert rates[-1] < 0.05 * settings.lr
    assert int(np.argmax(rates)) < len(rates) / 5


def test_only_the_newest_checkpoints_are_kept_and_broken_weights_never_saved(place: Path, tmp_path: Path) -> None:
    model = load_model(place / "draft")
    params = freeze(model, "layers")
    optimizer = optimizer_of(Settings(**{**BASE, "max_steps": 1}), params)
    for step in range(1, 5):
        for _, p in params:
            p.grad = torch.full_like(p, float(step))
        optimizer.step()
        save_checkpoint(tmp_path, vars(Position(step=step)), params, optimizer, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]
    assert {f.suffix for f in (tmp_path / "step-000004").iterdir()} == {".safetensors", ".json"}
    other = load_model(place / "draft")
    others = freeze(other, "layers")
    again = optimizer_of(Settings(**{**BASE, "max_steps": 1}), others)
    assert load_checkpoint(tmp_path, others, again) == vars(Position(step=4))
    for (name, p), (_, q) in zip(params, others, strict=True):
        assert torch.equal(p, q), name
        assert all(torch.equal(value, again.state[q][key]) for key, value in optimizer.state[p].items())
    with torch.no_grad():
        params[3][1][0] = torch.inf
    with pytest.raises(PartFailedError, match="last good checkpoint"):
        save_checkpoint(tmp_path, vars(Position(step=5)), params, optimizer, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_loss_that_is_not_finite_stops_with_the_reason_and_keeps_the_checkpoint(
    place: Path, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**{**BASE, "max_steps": 9, "checkpoint_every": 2, "keep": 1})
    original, calls = head_loss, iter(range(1, 100))

    def breaks(hidden: torch.Tensor, *rest: Any) -> Any:
        return original(hidden * (float("nan") if next(calls) == 6 else 1), *rest)

    monkeypatch.setattr(distill.step, "head_loss", breaks)
    rows = rows_of(place / "train")
    with pytest.raises(PartFailedError, match=r"step 6: the loss is nan.*lower lr"):
        fit(accelerator, load_model(place / "draft"), rows, {}, settings, tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    weights = load_file(tmp_path / "checkpoints" / "step-000004" / "weights.safetensors")
    assert all(bool(torch.isfinite(t).all()) for t in weights.values())
    assert fit(accelerator, load_model(place / "draft"), rows, {}, settings, tmp_path)["steps"] == 9
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 10))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_evaluation_that_is_not_finite_stops_with_the_reason_and_keeps_the_checkpoints(
    place: Path, accelerator: Accelerator, tmp_path: Path
) -> None:
    """A rate so high that the very next step's weights give NaN, met by the evaluation before any loss is."""
    rows, held = rows_of(place / "train"), {"own": rows_of(place / "held")}
    good = Settings(**{**BASE, "max_steps": 2, "checkpoint_every": 1})
    fit(accelerator, load_model(place / "draft"), rows, held, good, tmp_path)
    before = files_of(tmp_path / "checkpoints")
    wild = replace(good, max_steps=5, lr=1e25, warmup=0.0, eval_every=1)
    with pytest.raises(PartFailedError, match=r"^step 3, heldout\.own: .* not finite on prompt \w+;.*lower lr") as e:
        fit(accelerator, load_model(place / "draft"), rows, held, wild, tmp_path)
    assert "\n" not in str(e.value)
    assert len(before) == 6
    assert files_of(tmp_path / "checkpoints") == before
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if row["kind"] == "eval"] == [0, 2]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("eval_prompts", [8, 2])
def test_a_damaged_row_that_only_a_heldout_prompt_meets_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], eval_prompts: int
) -> None:
    """The head is untied, so nothing else sees the row: met by the first evaluation, or by the last where that one is of other
    prompts."""
    target = tiny.folder(tmp_path / "target", layers=2, tied=False)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 1])
    store(tmp_path / "train", answered(target, 8, seed=1), target)
    held = made_up([5, 4, 6], seed=3)
    known = {i for row in open_answers(tmp_path / "train").data for i in row["input_ids"]}
    last = max(held, key=lambda answer: answer.prompt.id)  # rows are in the order of their ids
    known |= {i for answer in held if answer is not last for i in answer.input_ids}
    lone = next(i for i in last.input_ids[:20] if i not in known)
    store(tmp_path / "held", held, target)
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    weights["model.embed_tokens.weight"][lone, 0] = torch.nan
    save_file(weights, tmp_path / "draft" / "model.safetensors", {"format": "pt"})
    out = tmp_path / "out"
    more = {
        "max_steps": 2,
        "epochs": "null",
        "checkpoint_every": 1,
        "trainable": "layers",
        "eval_prompts": eval_prompts,
    }
    monkeypatch.setattr(sys, "argv", ["distill", *keys(tmp_path, out, **more)])
    seen = []
    for _ in range(2):  # started again it says the same
        assert guarded(main) == 3
        said = capsys.readouterr().err
        assert "Traceback" not in said
        (line,) = [line for line in said.splitlines() if line.startswith("failed: ")]
        first = "step 0, heldout.own: " if eval_prompts == 8 else "heldout.own, before training: "
        assert line.startswith(
            f"failed: {first}the drafter gives figures that are not finite on prompt {last.prompt.id}; "
        )
        seen.append(files_of(out / "checkpoints"))
    assert len(seen[0]) == (0 if eval_prompts == 8 else 6)
    assert seen[1] == seen[0]


# ---------------------------------------------------------------- the recipe in processes


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def keys(place: Path, out: Path, **more: Any) -> list[str]:
    values = {"draft": place / "draft", "data": place / "train", "heldout.own": place / "held", "out": out, "epochs": 5,
              "batch_size": 4, "lr": 3e-3, "chunk": 64, "eval_every": 8, "eval_prompts": 8, "checkpoint_every": 6,
              "threads": 1, "trainable": "all"}  # fmt: skip
    return [f"{k}={v}" for k, v in (values | more).items()]


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint",
            "localhost:0"]  # fmt: skip
LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--config_file",
                   str(ROOT / "recipes" / "configs" / "accelerate" / "one_process.yaml"), str(RECIPE)],
    "path": [str(RECIPE)],
    "module": ["-m", "recipes.distill"],
    "torchrun": [*TORCHRUN, str(RECIPE)],
}  # fmt: skip


def launch(how: str, words: list[str], cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[how], *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-9000:]


def test_accelerate_launch_with_overrides_alone(place: Path, tmp_path: Path) -> None:
    """As the README has it: by path, from a folder without any config file, no launcher's config either."""
    bare = ["-m", "accelerate.commands.launch", str(RECIPE)]
    words = [f"target={place / 'target'}", f"draft={place / 'draft'}", f"data={place / 'train'}", "max_steps=1"]
    home = {"HF_HOME": str(tmp_path / "home")}  # where `accelerate config` would have left a file
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(
        [sys.executable, *bare, *words],
        cwd=tmp_path / "cwd",
        env=environment() | home,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-9000:]
    out = tmp_path / "cwd" / "runs" / "distill"
    assert read_pair(out / "drafter")["training"]["steps"] == 1
    assert done.stdout.splitlines()[-1] == "wrote runs/distill/drafter"


def descendants(pid: int) -> list[int]:
    """`pid` and all its children's children, by /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for p in found:
        found += parents.get(p, [])
    return found


def kill_in_the_middle(how: str, words: list[str], cwd: Path, out: Path, step: int) -> None:
    """Starts the recipe and kills -9 all its processes once `step` is logged."""
    with open(cwd / f"{how}.log", "w") as log:
        process = subprocess.Popen([sys.executable, *LAUNCHERS[how], *words], cwd=cwd, env=environment(), stderr=log)
    end = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_jsonl(out / "metrics.jsonl")):
        assert process.poll() is None, (cwd / f"{how}.log").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.005)
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert not (out / "drafter").exists(), "it was over before it was killed: the test shows nothing"


def log_of(out: Path) -> list[dict[str, Any]]:
    """All that must repeat exactly: the log without its clock."""
    rows = read_jsonl(out / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in rows]


@pytest.fixture(scope="module")
def whole(place: Path) -> Callable[..., Path]:
    """Runs that were not stopped, one per launcher (and other keys), each from another working directory."""
    made: dict[tuple[str, ...], Path] = {}

    def get(how: str, **more: Any) -> Path:
        key = (how, *more)
        if key not in made:
            made[key] = place / f"whole-{'-'.join(key)}"
            size = {"batch_size": 2} if how == "torchrun" else {}
            launch(how, keys(place, made[key], **size, **more), place)
        return made[key]

    return get


DROPOUT = {"trainable": "lora", "lora.dropout": 0.1}


@pytest.mark.parametrize("more", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize(("first", "then"), [("module", "path"), ("torchrun", "torchrun")])
def test_killed_in_mid_epoch_and_started_again_it_is_the_run_that_was_not_stopped(
    place: Path, whole: Callable[..., Path], tmp_path: Path, first: str, then: str, more: dict[str, Any]
) -> None:
    """D14 on one process and on two; also launched by accelerate, by path, by -m and by torchrun, from another folder.

    64 rows in windows of 4: step 22 is in the middle of epoch 2, four steps after a checkpoint. Rows logged after it
    are done again. Losses, rates, norms and evaluations are equal to the last bit, and so are the weights.
    With dropout too: what is dropped is a function of seed, step and rank.
    """
    out = tmp_path / "run"
    words = keys(place, out, **({"batch_size": 2} if first == "torchrun" else {}), **more)
    kill_in_the_middle(first, words, tmp_path, out, step=22)
    launch(then, words, tmp_path)
    reference = whole("accelerate" if then == "path" else "torchrun", **more)
    assert log_of(out) == log_of(reference)
    assert len([r for r in log_of(out) if r["kind"] == "train"]) == 80
    ours, theirs = (load_file(o / "drafter" / "model.safetensors") for o in (out, reference))
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert read_json(out / "evaluation.json")["sets"] == read_json(reference / "evaluation.json")["sets"]


@pytest.mark.parametrize(("first", "then"), [("torchrun", "path"), ("path", "torchrun")])
def test_killed_on_two_processes_it_goes_on_on_one_and_back(
    place: Path, whole: Callable[..., Path], tmp_path: Path, first: str, then: str
) -> None:
    """D14 across processes: the same ids in the same windows, losses within rounding, though a start has other ranks."""
    out, size = tmp_path / "run", {"batch_size": 2} if first == "torchrun" else {"batch_size": 4}
    words = keys(place, out, **size)
    kill_in_the_middle(first, words, tmp_path, out, step=22)
    launch(then, words, tmp_path)
    ours, theirs = ([r for r in log_of(o) if r["kind"] == "train"] for o in (out, whole("torchrun")))
    assert [(r["step"], r["epoch"], r["tokens"], r["lr"]) for r in ours] == [
        (r["step"], r["epoch"], r["tokens"], r["lr"]) for r in theirs
    ]
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=0.02)
    np.testing.assert_allclose([r["loss"] for r in ours[:30]], [r["loss"] for r in theirs[:30]], rtol=1e-3)


def test_two_processes_train_as_one_does(whole: Callable[..., Path]) -> None:
    """D11 seen from outside: the same windows, so the same first loss and norm, and losses that stay together."""
    one, two = ([r for r in log_of(whole(how)) if r["kind"] == "train"] for how in ("accelerate", "torchrun"))
    assert [r["tokens"] for r in one] == [r["tokens"] for r in two]
    for key in ("loss", "kl", "ce", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in one[:10]], [r[key] for r in two[:10]], rtol=1e-3)
        np.testing.assert_allclose(one[-1][key], two[-1][key], rtol=0.05)


def test_the_artifact_is_a_better_drafter_that_loads(place: Path, whole: Callable[..., Path]) -> None:
    out = whole("accelerate")
    evaluation = read_json(out / "evaluation.json")
    own = evaluation["sets"]["own"]
    assert own["prompts"] == 24
    assert own["after"]["top1"] > own["before"]["top1"] + 0.1
    assert own["after"]["tau"]["4"] > own["before"]["tau"]["4"]
    assert own["after"]["alpha_low"] <= own["after"]["alpha_high"]
    assert "top-1 agreement on own rose" in evaluation["verdict"]
    assert set(own["groups"]["seen"]) == {"true", "false"}
    lines = read_jsonl(out / "evaluation_prompts.jsonl")
    answers = {row["id"]: row for row in open_answers(place / "held").data}
    model = load_model(out / "drafter")
    for line in lines:  # w, recomputed the plain way
        row = answers[line["id"]]
        ids, start = torch.tensor([row["input_ids"]]), row["spans"][0]
        with torch.inference_mode():
            guess = model(ids).logits[0, start - 1 : -1, : tiny.REAL_TOKENS].argmax(-1)
        assert line["w_after"] == [(guess == ids[0, start:]).int().tolist()]
    log = read_jsonl(out / "metrics.jsonl")
    assert [r["step"] for r in log if r["kind"] == "eval"] == list(range(0, 81, 8))
    assert set(log[1]) >= {
        "kind",
        "step",
        "epoch",
        "tokens",
        "loss",
        "kl",
        "ce",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "seconds",
    }


def test_the_artifact_carries_what_the_draft_had(place: Path, whole: Callable[..., Path]) -> None:
    drafter = whole("accelerate") / "drafter"
    pair = read_pair(drafter)
    assert [step["step"] for step in pair["made"]] == ["init", "distill"]
    assert pair["training"]["steps"] == 80
    assert pair["target"] == read_pair(place / "draft")["target"]
    for file in (place / "draft").iterdir():
        copied = file.name not in ("model.safetensors", "pair.json", "README.md")
        assert not copied or (drafter / file.name).read_bytes() == file.read_bytes()
    shapes = [
        {n: (t.shape, t.dtype) for n, t in load_file(d / "model.safetensors").items()}
        for d in (drafter, place / "draft")
    ]
    assert shapes[0] == shapes[1]


# ---------------------------------------------------------------- the recipe in this process


@pytest.fixture
def alone() -> Iterator[None]:
    """The recipe sets the threads of its process; this one is shared by all tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("alone")
def test_learning_rate_zero_changes_nothing_and_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D15."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"lr": 0, "max_steps": 2, "batch_size": 4, "threads": 1}))
    out = tmp_path / "out"
    words = [f"draft={place / 'draft'}", f"data={place / 'train'}", f"out={out}", f"heldout.own={place / 'held'}"]
    words += [f"target={place / 'target'}"]
    assert main(["--config", str(config), *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"].startswith("no measurable change")
    assert result["sets"]["own"]["change"]["top1"] == [0, 0, 0]
    assert result["verdict"] in (out / "drafter" / "README.md").read_text()
    before = (out / "drafter" / "model.safetensors").stat().st_mtime_ns
    assert main(["--config", str(config), *words]) == 0  # finished already: says so, touches nothing
    assert "no measurable change" in capsys.readouterr().out
    assert (out / "drafter" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.usefixtures("alone")
def test_wandb_offline_gets_the_metrics(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "out"
    assert main(keys(place, out, tracker="wandb", max_steps=2, epochs="null", eval_every=1)) == 0
    (run,) = (out / "wandb").glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    content = record.read_bytes()
    for key in (b"train/loss", b"eval/own/top1", b"eval/own/tau_4"):
        assert key in content


@pytest.mark.usefixtures("alone")
def test_dry_run_prints_sizes_and_writes_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*keys(place, tmp_path / "out", trainable="layers"), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["prompts"], plan["steps_per_epoch"], plan["steps"]) == (64, 16, 80)
    params = sum(p.numel() for _, p in freeze(load_model(place / "draft"), "layers"))
    assert plan["trainable_parameters"] == params
    assert plan["checkpoint_bytes"] == 12 * params
    assert plan["supervised_tokens"] == int(rows_of(place / "train").supervised_P.sum())
    assert not (tmp_path / "out").exists()
    same = {"trainable": "layers", "chunk": 8}
    online = same | {"target": place / "target", "signal": "online", "target_dtype": "bfloat16"}
    memory = []
    for words in (same, online):
        assert main([*keys(place, tmp_path / "out", **words), "--dry-run", "--json"]) == 0
        memory.append(json.loads(capsys.readouterr().out)["plan"]["memory_bytes"])
    buffers = 4 * 8 * tiny.ROWS  # bytes of one: the record takes one, the target beside the drafter four
    target = 2 * sum(p.numel() for p in load_model(place / "target").parameters())
    assert memory[1] - memory[0] == target + 3 * buffers


@pytest.mark.usefixtures("alone")
def test_bad_input_is_refused_in_one_line_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    swapped = tiny.folder(tmp_path / "swapped", swap=(50, 60), layers=2)
    init_drafter(resolve(str(swapped)), tmp_path / "foreign", [0, 1])
    wide = tiny.folder(tmp_path / "wide", layers=2, rows=288)
    init_drafter(resolve(str(wide)), tmp_path / "wider", [0, 1])
    short = tiny.folder(tmp_path / "short", layers=2, positions=16)
    init_drafter(resolve(str(short)), tmp_path / "shorter", [0, 1])
    tuned = tiny.folder(tmp_path / "tuned", layers=4, seed=1)
    init_drafter(resolve(str(tuned)), tmp_path / "of-tuned", [0, 3])
    shutil.copytree(place / "target", tmp_path / "reworded")
    (tmp_path / "reworded" / "chat_template.jinja").write_text(tiny.CHATML.replace("assistant", "model"))
    init_drafter(resolve(str(tmp_path / "reworded")), tmp_path / "of-reworded", [0, 3])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"draft": tmp_path / "nowhere"}, "no such model"),
        ({"draft": swapped}, "draftsmith init"),
        ({"draft": tmp_path / "foreign"}, "tokenizers differ"),
        ({"draft": tmp_path / "wider"}, "vocabulary rows"),
        ({"draft": tmp_path / "shorter"}, "context of 16"),
        (
            {"draft": tmp_path / "of-tuned"},
            f"tuned, which differs in its weights: generate answers with that one, or, where the pair will be served with "
            f"{place / 'target'}, say so: target=",
        ),
        ({"draft": tmp_path / "of-reworded"}, "which differs in its template: generate answers with that one"),
        ({"data": tmp_path / "nowhere"}, "draftsmith generate"),
        ({"target": swapped}, "another target"),
        ({"heldout.own": place / "train"}, "are trained on too"),
        ({"out": tmp_path / "taken"}, "name another output folder"),
        ({"losses.jsd": 1}, "signal=online"),
        ({"losses.forward_kl": "[[0.5, 1], [0.2, 0]]"}, "must rise"),
        ({"objective": "auto", "losses.top1_ce": 1}, "objective=auto chooses"),
        ({"objective": "losses"}, "at least one"),
        ({"signal": "online"}, "needs the target"),
        ({"on_policy": 0.5}, "target must be online"),
        ({"top_logprobs": 9}, "the answers hold 8 ids"),
        ({"keep_share": 0.4}, "reference="),
        ({"keep_share": 0.4, "reference": tmp_path / "wide"}, "288 vocabulary rows"),
        ({"keep_share": 0.4, "reference": tmp_path / "swapped"}, "other ids than the draft's"),
        ({"signal": "online", "target": place / "target", "target_device": "cuda:77"}, "target_device=cuda:77"),
        ({"signal": "online", "target": place / "target", "target_device": "moon"}, "target_device=moon"),
        ({"signal": "online", "target": place / "target", "top_logprobs": 3}, "leave it out"),
        ({"temperature": 0.7}, "temperature 1 alone"),
        ({"take": "best", "heldout.own": "null", "heldout": "{}"}, "give heldout.NAME"),
        # keys that nothing would look at
        ({"target_dtype": "bfloat16"}, "target_dtype is for signal=online"),
        ({"target_device": "cpu"}, "target_device is for signal=online"),
        ({"lora.rank": 8}, "lora is for trainable=lora"),
        ({"jsd_beta": 0.9}, "jsd_beta is for losses.jsd"),
        ({"selection": "random"}, "selection is for keep_share"),
        ({"on_policy_temperature": 0.5}, "on_policy_temperature is for on_policy"),
        ({"losses.forward_kl": 1, "serve_temperature": 0.7}, "serve_temperature is for objective=auto"),
        (
            {"losses.forward_kl": 1, "draft_sample_method": "probabilistic", "heldout.own": "null", "heldout": "{}"},
            "draft_sample_method is for objective=auto, survival=true or heldout",
        ),
        # numbers that no run can have
        ({"epochs": ".inf"}, "epochs"),
        ({"minutes": ".inf"}, "minutes"),
        ({"seed": 1 << 40}, "seed"),
        ({"losses.forward_kl": ".inf"}, "losses.forward_kl"),
        ({"losses.forward_kl": "[[0, .nan]]"}, "losses.forward_kl"),
        ({"batchsize": 3}, "batch_size"),
        ({"losses.forward_k": 1}, "losses.forward_kl"),
        ({"lr": "fast"}, "lr"),
        ({"losses.forward_kl": 0, "losses.cross_entropy": 0}, "nothing would be learnt"),
    ]
    for more, expected in cases:
        with pytest.raises(InputError) as e:
            main(keys(place, more.get("out", tmp_path / "out"), **{k: v for k, v in more.items() if k != "out"}))
        assert expected in str(e.value), more
        assert "\n" not in str(e.value)
        assert not (tmp_path / "out").exists(), more
    assert os.listdir(tmp_path / "taken") == ["thesis.txt"]
    # meant so: the target was tuned on since then, and the answers are of what it is now
    meant = {"draft": tmp_path / "of-tuned", "target": place / "target"}
    assert main([*keys(place, tmp_path / "out", **meant), "--dry-run"]) == 0


@pytest.mark.usefixtures("alone")
def test_a_full_disk_outside_the_checkpoint_is_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real limit on the size of files while one file is written: exit 3, nothing half-written, checkpoints bit-equal; and the
    same command goes on from there."""
    out, old = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    words = keys(place, out, max_steps=2, epochs="null", checkpoint_every=1)
    monkeypatch.setattr(sys, "argv", ["distill", *words])
    before: dict[Path, bytes] = {}
    for module, name, limit, what in (
        (recipes.distill, "write_jsonl", 100, "evaluation_prompts.jsonl"),
        (recipes.distill, "write_json", 100, "evaluation.json"),
        (recipes.distill, "write_drafter", 20_000, "drafter"),
        (distill.train, "write_text", 100, "metrics.jsonl"),  # of a start that goes on
    ):
        write = getattr(module, name)

        def limited(*args: Any, write: Any = write, limit: int = limit) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            try:
                return write(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)

        with monkeypatch.context() as patched:
            patched.setattr(module, name, limited)
            assert guarded(main) == 3
        said = capsys.readouterr().err
        (line,) = [line for line in said.splitlines() if line.startswith("failed: ")]
        assert line.startswith(f"failed: {out / what} could not be written (File too large)")
        assert "Traceback" not in said
        assert {p.name for p in out.iterdir()} <= {
            "config.yaml", "provenance.json", "metrics.jsonl", "checkpoints", "evaluation_prompts.jsonl", "evaluation.json"
        }  # fmt: skip
        now = {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}
        assert now == (before or now)
        before = now
    assert "step-000002" in {p.parent.name for p in before}
    assert guarded(main) == 0
    assert read_pair(out / "drafter")["training"]["steps"] == 2


@pytest.mark.usefixtures("alone")
def test_other_temperatures_are_said(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, temperature in (("train", 0.0), ("held", 0.7)):
        shutil.copytree(place / name, tmp_path / name)
        meta = read_json(tmp_path / name / "meta.json")
        write_json(tmp_path / name / "meta.json", meta | {"sampling": {"max_tokens": 16, "temperature": temperature}})
    data = {"data": tmp_path / "train", "heldout.own": tmp_path / "held"}
    words = keys(place, tmp_path / "out", **data)
    assert main([*words, "serve_temperature=0.7", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "the answers were drawn at temperature 0, and the pair is to be served at 0.7" in said
    assert "heldout.own: drawn at temperature 0.7, data at 0" in said
    assert main([*keys(place, tmp_path / "out"), "serve_temperature=0", "--dry-run"]) == 0
    assert "drawn at" not in capsys.readouterr().err
    meta = read_json(tmp_path / "held" / "meta.json")  # texts from elsewhere: nobody knows
    write_json(tmp_path / "held" / "meta.json", meta | {"sampling": None, "turns": "given"})
    assert main([*words, "--dry-run"]) == 0
    assert "drawn at" not in capsys.readouterr().err


@pytest.mark.usefixtures("alone")
def test_another_config_or_other_data_is_refused(place: Path, tmp_path: Path, accelerator: Accelerator) -> None:
    rows, settings = rows_of(place / "train"), Settings(**{**BASE, "max_steps": 2})
    fit(accelerator, load_model(place / "draft"), rows, {}, settings, tmp_path / "out", digests={"data": "a"})
    with pytest.raises(InputError, match="another data"):
        fit(accelerator, load_model(place / "draft"), rows, {}, settings, tmp_path / "out", digests={"data": "b"})
    words = {"max_steps": 1, "epochs": "null", "heldout": "{}"}
    plain = [w for w in keys(place, tmp_path / "run", **words) if not w.startswith("heldout.own")]
    assert main(plain) == 0
    assert read_json(tmp_path / "run" / "evaluation.json")["verdict"].startswith("not evaluated")
    with pytest.raises(InputError, match="differs in seed"):
        main([*plain, "seed=1"])


@pytest.mark.usefixtures("alone")
def test_a_loss_that_leaps_stops_the_run(place: Path, accelerator: Accelerator, tmp_path: Path) -> None:
    """A rate that is far too high after a calm beginning: the run says so, and its last checkpoint is from before."""
    settings = Settings(**{**BASE, "max_steps": 400, "lr": 3e-3, "checkpoint_every": 20, "warmup": 0.0, "clip": 1e9})
    rows, model, steps = rows_of(place / "train"), load_model(place / "draft"), iter(range(1, 1000))
    model.register_forward_pre_hook(lambda *_: None)
    decoder = model.get_decoder()

    def leaps(module: Any, args: Any, output: Any) -> Any:
        if module.training and next(steps) > 120:  # two passes a step, one for the shared columns
            output.last_hidden_state = -3 * output.last_hidden_state
        return output

    decoder.register_forward_hook(leaps)
    with pytest.raises(PartFailedError, match="the loss has been above"):
        fit(accelerator, model, rows, {}, settings, tmp_path)
    newest = max(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert newest == "step-000060"


@pytest.mark.usefixtures("alone")
def test_the_best_checkpoint_is_kept_and_can_be_taken(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = keys(place, out, take="best", eval_every=4, max_steps=40, epochs="null", lr=2e-2, keep=1, eval_prompts=24)
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    evals = [r for r in read_jsonl(out / "metrics.jsonl") if r["kind"] == "eval" and r["step"]]
    best = max(evals, key=lambda r: (r["tau"]["4"], -r["step"]))
    assert result["training"]["taken_step"] == best["step"]
    assert result["sets"]["own"]["after"]["tau"]["4"] == pytest.approx(best["tau"]["4"])
    assert {p.name for p in (out / "checkpoints").iterdir()} == {f"step-{best['step']:06d}", "step-000040"}


@pytest.mark.parametrize(("K", "minutes"), [(4, None), (12, 0.05)])
def test_the_last_step_may_be_the_best_at_any_served_k(
    place: Path, tmp_path: Path, accelerator: Accelerator, K: int, minutes: float | None
) -> None:
    """A run's last step is evaluated though no interval ends there, and τ is that of the K that is served."""
    limit = {"max_steps": 6} if minutes is None else {"minutes": minutes}
    settings = Settings(**{**BASE, **limit, "num_speculative_tokens": K})
    held = rows_of(place / "held")
    done = fit(accelerator, load_model(place / "draft"), rows_of(place / "train"), {"own": held}, settings, tmp_path)
    state = read_json(tmp_path / "checkpoints" / f"step-{done['steps']:06d}" / "state.json")
    assert state["state"]["best"] == state["figure"]
    log = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in log if row["kind"] == "eval"] == [0, done["steps"]]
    if K == 4:
        assert state["figure"] == log[-1]["tau"]["4"]
    else:
        assert state["figure"] >= log[-1]["tau"]["8"]


@pytest.mark.usefixtures("alone")
def test_a_dead_tracker_does_not_end_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wandb whose service is gone (a stand-in: its start raises): one line, and metrics.jsonl is whole."""

    def gone(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to the service")

    monkeypatch.setattr("wandb.init", gone)
    out = tmp_path / "out"
    assert main(keys(place, out, tracker="wandb", max_steps=3, epochs="null", eval_every=1)) == 0
    assert capsys.readouterr().err.count("the tracker is dead") == 1
    assert [r["step"] for r in read_jsonl(out / "metrics.jsonl") if r["kind"] == "train"] == [1, 2, 3]
