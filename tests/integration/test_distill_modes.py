"""What a step may be made of: an online target, on-policy answers, survival weights, a filter; the same however split."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

import distill.step
from distill.answers import open_answers
from distill.batches import Rows, check_rows, collate, supervised_ids
from distill.emphasis import worth_learning
from distill.evaluate import score_prompts, summary
from distill.fake_quantize import Quantizer, quantized
from distill.head import Head, head_loss, head_scores
from distill.losses import LOSSES, NEED_ALL
from distill.mask_blocks import Parallel
from distill.quantize import Choice, plan_quantize
from distill.settings import on_policy
from distill.signals import Target, cut, get_signal, online
from distill.step import ready, window_gradients
from distill.student import freeze, supervised_hidden
from distill.train import Settings, fit
from pairing.errors import InputError
from pairing.files import read_jsonl
from pairing.init import init_drafter
from pairing.pair import describe_model, read_pair, update_pair
from pairing.source import load_model, resolve
from recipes.distill import main
from tests import tiny
from tests.integration.test_distill import BASE
from tests.stored_answers import answered, made_up, store

MASK = tiny.REAL_TOKENS + 1
LIMITS = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    target = tiny.folder(place / "target", layers=4)
    init_drafter(resolve(str(target)), place / "draft", [0, 3])
    init_drafter(resolve(str(target)), place / "reference", [0, 1, 3])
    store(place / "train", answered(target, 24, seed=1), target)
    store(place / "held", answered(target, 8, seed=2), target)
    return place


@pytest.fixture(scope="module")
def rows(place: Path) -> Rows:
    return check_rows(open_answers(place / "train"), "data", **LIMITS)


@pytest.fixture(scope="module")
def target(place: Path) -> Target:
    return online(load_model(place / "target"), "target", "cpu", "cpu")


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def settings(**more: Any) -> Settings:
    return Settings(**{**BASE, "max_steps": 1, **more})


def gradients(
    accelerator: Accelerator, place: Path, rows: Rows, target: Target | None, at: Settings
) -> list[torch.Tensor]:
    model = load_model(place / "draft")
    params = freeze(model, at.trainable)
    reference = load_model(place / "reference") if at.keep_share < 1 else None
    run = ready(accelerator, model, rows, at, get_signal(rows, target, at.top_logprobs), reference)
    stats = window_gradients(run, np.arange(6), at.losses, 0)  # type: ignore[arg-type]
    return [torch.tensor(list(stats.values())), *(p.grad for _, p in params if p.grad is not None)]


MODES: dict[str, dict[str, Any]] = {
    "cached": {},
    "cached, every loss": {
        "losses": {name: 0.5 for name in LOSSES if name not in NEED_ALL},
        "survival": "probabilistic",
    },
    "cached, 3 ids": {"top_logprobs": 3},
    "online": {"losses": dict.fromkeys(LOSSES, 0.3), "block": 100},
    "online, on-policy": {"losses": {"jsd": 1.0}, "jsd_beta": 0.9, "on_policy": 1.0},
    "survival": {"survival": "greedy", "num_speculative_tokens": 3},
    "masks": {"parallel": Parallel(4, MASK, keep=0.8)},
    "masks, survival": {"parallel": Parallel(4, MASK, keep=0.8), "survival": "probabilistic"},
    "masks, online": {"parallel": Parallel(3, MASK), "losses": {"reverse_kl": 1.0, "forward_kl": 0.5}},
    "masks, online, on-policy": {"parallel": Parallel(4, MASK), "losses": {"jsd": 1.0}, "on_policy": 1.0},
    "filter": {"keep_share": 0.4, "survival": "greedy"},
    "filter's control": {"keep_share": 0.4, "selection": "random"},
}


@pytest.mark.parametrize("mode", list(MODES))
def test_a_window_split_otherwise_has_the_same_gradient(
    accelerator: Accelerator, place: Path, rows: Rows, target: Target, mode: str
) -> None:
    """D11 for everything that a step may be made of: 6 rows at once, and one by one in chunks of 5."""
    at = settings(**{"trainable": "all", "batch_size": 6, **MODES[mode]})
    online_target = target if "online" in mode else None
    together = gradients(accelerator, place, rows, online_target, at)
    apart = gradients(accelerator, place, rows, online_target, dataclasses.replace(at, batch_size=1, chunk=5))
    assert len(together) == len(apart) > 10
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=2e-6 * max(1.0, float(a.abs().max())))
    assert any(bool(g.any()) for g in together[1:])


def test_gradient_checkpointing_changes_no_loss(
    place: Path, rows: Rows, accelerator: Accelerator, tmp_path: Path
) -> None:
    logs = []
    for on in (False, True):
        at = settings(max_steps=3, trainable="all", gradient_checkpointing=on)
        fit(accelerator, load_model(place / "draft"), rows, {}, at, tmp_path / str(on))
        logs.append(read_jsonl(tmp_path / str(on) / "metrics.jsonl"))
    for plain, other in zip(*logs, strict=True):
        assert other["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)


def test_the_modes_differ(accelerator: Accelerator, place: Path, rows: Rows, target: Target) -> None:
    """No option is silently ignored: each changes the gradient."""
    plain = gradients(accelerator, place, rows, None, settings(trainable="all"))
    for mode, more in MODES.items():
        if mode != "cached":
            other = gradients(
                accelerator, place, rows, target if "online" in mode else None, settings(trainable="all", **more)
            )
            assert max(float((a - b).abs().max()) for a, b in zip(plain[1:], other[1:], strict=True)) > 1e-5, mode


def test_the_filters_control_does_the_same_work(
    accelerator: Accelerator, place: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdaSPEC's filter and its random control learn on equally many positions of each row, others of them, and ask the reference
    of the same columns: they differ in which positions alone."""
    answers = rows.supervised_P[:6].tolist()
    kept: list[torch.Tensor] = []
    learnt: list[int] = []

    def keep(gap_N: torch.Tensor, row_N: torch.Tensor, share: float) -> torch.Tensor:
        kept.append(worth_learning(gap_N, row_N, share))
        counts.extend(torch.bincount(row_N[kept[-1]]).tolist())
        return kept[-1]

    def loss(hidden_NH: torch.Tensor, *rest: Any) -> Any:
        learnt.append(len(hidden_NH))
        return head_loss(hidden_NH, *rest)

    monkeypatch.setattr(distill.step, "worth_learning", keep)
    monkeypatch.setattr(distill.step, "head_loss", loss)
    found = []
    for selection in ("gap", "random"):
        counts: list[int] = []
        asked: list[tuple[int, ...]] = []
        reference, model = load_model(place / "reference"), load_model(place / "draft")
        reference.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, asked=asked: asked.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        freeze(model, "all")
        at = settings(trainable="all", batch_size=3, keep_share=0.4, selection=selection)
        run = ready(accelerator, model, rows, at, get_signal(rows), reference)
        window_gradients(run, np.arange(6), at.losses, 0)  # type: ignore[arg-type]
        found.append((counts, asked))
    assert found[0] == found[1]
    assert sorted(found[0][0]) == sorted(max(1, round(0.4 * n)) for n in answers)
    assert learnt[: len(learnt) // 2] == learnt[len(learnt) // 2 :]
    assert sum(learnt) == 2 * sum(found[0][0])
    assert len(found[0][1]) == 4  # two batches, each with a prefix of its own
    assert not torch.equal(torch.cat(kept[:2]), torch.cat(kept[2:]))


def test_online_is_the_limit_of_the_cache(place: Path, rows: Rows, target: Target) -> None:
    """With the target's own answers the cache's forward KL is below the whole one and near it; Σ min lies in the bracket."""
    model, batch = load_model(place / "draft"), collate(rows, np.arange(6))
    with torch.no_grad():
        hidden, matrix = supervised_hidden(model, batch), model.get_output_embeddings().weight
    head = Head(tiny.REAL_TOKENS, 32)
    whole = head_scores(hidden, matrix, get_signal(rows, target)(batch), head)
    cached = head_scores(hidden, matrix, get_signal(rows)(batch), head)
    fewer = head_scores(hidden, matrix, get_signal(rows, top_logprobs=2)(batch), head)
    assert (cached.losses["forward_kl"] <= whole.losses["forward_kl"] + 2e-3).all()  # 16-bit logs in the cache
    assert (fewer.losses["forward_kl"] <= cached.losses["forward_kl"] + 1e-5).all()
    assert (cached.alpha_low_N - 2e-3 <= whole.alpha_N).all()
    assert (whole.alpha_N <= cached.alpha_high_N + 2e-3).all()
    assert torch.equal(whole.top1_N, cached.top1_N)
    assert torch.equal(whole.accepted_N, cached.accepted_N)
    torch.testing.assert_close(whole.ratio_N, cached.ratio_N, rtol=0, atol=2e-3)


def test_a_cut_cache_is_the_cache_of_fewer_ids(rows: Rows) -> None:
    signal = collate(rows, np.arange(4)).signal
    short = cut(signal, 3)
    torch.testing.assert_close(
        short.head_logp_NK.exp().sum(-1) + short.tail_N, torch.ones(len(short.tail_N)), rtol=0, atol=3e-3
    )
    assert torch.equal(short.head_ids_NK, signal.head_ids_NK[:, :3])
    assert short.tail_N.mean() > signal.tail_N.mean()


def test_refusals_of_signals(place: Path, rows: Rows, target: Target, accelerator: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the answers hold 8 ids"):
        get_signal(rows, top_logprobs=9)
    narrow = online(tiny.model(rows=64), "other", "cpu", "cpu")
    with pytest.raises(InputError, match="64 vocabulary rows"):
        get_signal(rows, narrow)
    broken = load_model(place / "target")
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"not finite on prompt \w+"):
        get_signal(rows, online(broken, "broken", "cpu", "cpu"))(collate(rows, np.arange(2)))
    masks = {"parallel": Parallel(4, MASK), "keep_share": 0.5}
    for more, said in (({"on_policy": 0.5}, "target must be online"), ({"keep_share": 0.5}, "give reference"),
                       (masks, "leave it or parallel_drafting out")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            fit(accelerator, load_model(place / "draft"), rows, {}, settings(**more), tmp_path / "out")
    with pytest.raises(InputError, match="leave it out"):
        fit(accelerator, load_model(place / "draft"), rows, {}, settings(top_logprobs=3), tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", ["draft", "target", "reference"])
def test_a_model_whose_logits_are_not_finite_is_named(
    place: Path, rows: Rows, accelerator: Accelerator, tmp_path: Path, role: str, value: float
) -> None:
    models = {name: load_model(place / name) for name in ("draft", "target", "reference")}
    with torch.no_grad():
        models[role].get_output_embeddings().weight[70, 0] = value
    against = online(models["target"], "target", "cpu", "cpu")
    at = settings(keep_share=0.5)
    with pytest.raises(InputError, match=rf"the {role} \(llama\) gives logits that are not finite on prompt \w+"):
        fit(accelerator, models["draft"], rows, {}, at, tmp_path / "out", against, models["reference"])
    assert not (tmp_path / "out").exists()


def test_a_share_of_steps_is_on_policy_the_same_after_a_resume() -> None:
    at = settings(on_policy=0.3)
    steps = [on_policy(at, step) for step in range(400)]
    assert 0.22 < np.mean(steps) < 0.38
    assert steps == [on_policy(at, step) for step in range(400)]
    assert not any(on_policy(settings(), step) for step in range(50))


def test_the_drafters_own_answers_are_not_learnt_as_if_the_target_had_written_them(
    place: Path, rows: Rows, target: Target, accelerator: Accelerator, tmp_path: Path
) -> None:
    """Cross-entropy's weight goes to forward KL there, and survival asks Σ min(p, q), not whether the drafter agrees with
    itself."""
    weights = []
    for i, losses in enumerate(({"cross_entropy": 0.3, "forward_kl": 0.2}, {"forward_kl": 0.5})):
        at = settings(on_policy=1.0, losses=losses, max_steps=2)
        model = load_model(place / "draft")
        fit(accelerator, model, rows, {}, at, tmp_path / str(i), target)
        log = read_jsonl(tmp_path / str(i) / "metrics.jsonl")
        assert [row["loss"] for row in log] == pytest.approx([0.5 * row["kl"] for row in log])
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    at = settings(on_policy=1.0, on_policy_temperature=0.0, survival="greedy", losses={"forward_kl": 1.0})
    by_argmax = gradients(accelerator, place, rows, target, at)
    by_alpha = gradients(accelerator, place, rows, target, dataclasses.replace(at, survival="probabilistic"))
    for a, b in zip(by_argmax, by_alpha, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("more", "temperature"),
    [
        (["serve_temperature=0.6", "draft_sample_method=probabilistic"], 1.0),
        (["losses.lk_hybrid=1", "temperature=0.6"], 0.6),
    ],
)
def test_an_online_target_is_compared_at_the_given_temperature(
    place: Path, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], temperature: float
) -> None:
    out = tmp_path / "out"
    words = [f"draft={place / 'draft'}", f"data={place / 'train'}", f"out={out}", f"target={place / 'target'}"]
    words += ["signal=online", "max_steps=1", "batch_size=24", "threads=1", "--json"]
    assert main([*words, *more]) == 0
    assert json.loads(capsys.readouterr().out)["training"]["temperature"] == temperature
    (row,) = read_jsonl(out / "metrics.jsonl")
    batch = collate(rows, np.arange(24))
    model, p = load_model(place / "draft"), load_model(place / "target")
    with torch.no_grad():
        p_NV, q_NV = (
            ((supervised_hidden(m, batch) @ m.get_output_embeddings().weight.T)[:, : tiny.REAL_TOKENS] / temperature)
            .double()
            .log_softmax(-1)
            for m in (p, model)
        )
    assert row["kl"] == pytest.approx(float((p_NV.exp() * (p_NV - q_NV)).sum(-1).mean()), rel=1e-4)
    assert row["alpha"] == pytest.approx(float(torch.minimum(p_NV.exp(), q_NV.exp()).sum(-1).mean()), rel=1e-4)


def test_a_schedule_reaches_the_loss(place: Path, rows: Rows, accelerator: Accelerator, tmp_path: Path) -> None:
    """KL alone up to half of the run, LK alone after it: the log's loss is the one or the other."""
    losses = {"forward_kl": [(0.49, 1.0), (0.5, 0.0)], "lk_hybrid": [(0.49, 0.0), (0.5, 1.0)]}
    fit(accelerator, load_model(place / "draft"), rows, {}, settings(max_steps=4, losses=losses), tmp_path)
    log = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["loss"] == pytest.approx(row["kl"]) for row in log] == [True, True, False, False]
    assert [row["loss"] == pytest.approx(row["lk_hybrid"]) for row in log] == [False, False, True, True]


def test_the_recipe_trains_online_and_on_policy(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed after it was finished, it says so; τ rises on held-out prompts; the objective is in the record."""
    out = tmp_path / "out"
    words = [f"draft={place / 'draft'}", f"data={place / 'train'}", f"out={out}", f"heldout.own={place / 'held'}"]
    words += [
        f"target={place / 'target'}",
        "signal=online",
        "on_policy=0.3",
        "losses.jsd=1",
        "jsd_beta=0.1",
        "survival=true",
    ]
    assert main([*words, "epochs=8", "batch_size=4", "lr=3e-3", "trainable=all", "threads=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    change = result["sets"]["own"]["change"]
    assert change["top1"][0] > 0.1, change
    log = [row for row in read_jsonl(out / "metrics.jsonl") if row["kind"] == "train"]
    assert result["training"]["losses"] == {"jsd": 1.0}
    assert result["training"]["supervised_tokens"] == sum(row["supervised"] for row in log)
    assert log[-1]["jsd"] < log[0]["jsd"]


def test_auto_says_what_it_chose(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"draft={place / 'draft'}",
        f"data={place / 'train'}",
        f"out={tmp_path / 'out'}",
        "max_steps=1",
        "--dry-run",
    ]
    assert main(words) == 0
    assert "served greedily" in capsys.readouterr().out
    assert main([*words, "serve_temperature=0.7", "draft_sample_method=probabilistic", "--json"]) == 0
    assert "lk_hybrid" in json.loads(capsys.readouterr().out)["objective"]


@pytest.mark.parametrize(("trainable", "vocabulary"), [("lora", "true"), ("qlora", "false")])
def test_adapters_learn_and_are_merged(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trainable: str, vocabulary: str
) -> None:
    """D16, D17: the written drafter is a plain one in the draft's own type, better than the draft, and loads as it was."""
    out = tmp_path / "out"
    words = [f"draft={place / 'draft'}", f"data={place / 'train'}", f"out={out}", f"heldout.own={place / 'held'}"]
    words += [f"trainable={trainable}", "lora.rank=8", f"lora.vocabulary={vocabulary}"]
    words += ["epochs=12", "batch_size=4", "lr=3e-3"]
    assert main([*words, "threads=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sets"]["own"]["change"]["top1"][0] > 0.05
    drifted = result["training"]["merge_drift"]
    assert drifted["positions"] > 100
    assert (drifted["kl"] > 1e-4) == (trainable == "qlora")  # the 4-bit base was rounded, the merged one is not
    assert drifted["base"] == str(place / "draft")
    assert drifted["base_weights"] == describe_model(resolve(str(place / "draft")))["digests"]["weights"]
    assert drifted["on"] == "the first 8 prompts of heldout.own"  # which are all there are
    for figure, key in (("top1", "top1_after"), ("tau", "tau_after")):
        after = result["sets"]["own"]["after"][figure]
        assert drifted[key] == pytest.approx(after if figure == "top1" else after["4"])
    # with the adapters beside the base, as it was trained
    *_, evaluated = (row for row in read_jsonl(out / "metrics.jsonl") if row["kind"] == "eval")
    assert drifted["top1_before"] == pytest.approx(evaluated["top1"])
    assert drifted["tau_before"] == pytest.approx(evaluated["tau"]["4"])
    assert (drifted["num_speculative_tokens"], read_pair(out / "drafter")["training"]["merge_drift"]) == (4, drifted)
    assert f"| merge_drift.base_weights | {drifted['base_weights']} |" in (out / "drafter" / "README.md").read_text()
    trained, draft = (load_model(folder) for folder in (out / "drafter", place / "draft"))
    assert trained.state_dict().keys() == draft.state_dict().keys()
    with torch.no_grad():  # 13 padding rows of 272: none is ever the most likely one
        logits = trained(torch.randint(0, tiny.REAL_TOKENS, (8, 64))).logits
    assert int(logits.argmax(-1).max()) < tiny.REAL_TOKENS
    head = trained.get_output_embeddings().weight
    mean = head[: tiny.REAL_TOKENS].mean(0)
    torch.testing.assert_close(head[tiny.REAL_TOKENS :], mean.expand(tiny.ROWS - tiny.REAL_TOKENS, -1))


def test_a_merge_without_a_heldout_set_is_measured_on_what_was_trained_on(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"draft={place / 'draft'}", f"data={place / 'train'}", f"out={tmp_path / 'out'}", "trainable=lora"]
    assert main([*words, "lora.rank=2", "max_steps=1", "threads=1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["training"]["merge_drift"]
    assert said["on"] == "the first 8 prompts of data: trained on, as no held-out set was given"
    assert said["positions"] > 100
    assert said["tau_after"] == pytest.approx(said["tau_before"])
    assert 0 < said["top1_after"] <= 1


def test_made_rows_are_marked_until_they_learnt(
    place: Path, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repaired or transplanted draft: with its vocabulary frozen nothing changes for them, and that is said; trained, the mark
    goes from those that some answer holds."""
    said = supervised_ids(rows)
    known, unknown = min(said), max(set(range(tiny.REAL_TOKENS)) - said)
    draft = tmp_path / "draft"
    shutil.copytree(place / "draft", draft)
    update_pair(draft, needs_training=sorted([known, unknown]))
    begins = "rows of the draft that were made and never trained: "
    for trainable, left, why in (
        ("layers", sorted([known, unknown]), "they do not learn with trainable=layers: give trainable=all"),
        ("all", [unknown], "they stand in none of these answers"),
    ):
        out = tmp_path / trainable
        words = [f"draft={draft}", f"data={place / 'train'}", f"out={out}", f"trainable={trainable}"]
        assert main([*words, "max_steps=1", "threads=1"]) == 0
        ids = ", ".join(map(str, left))
        assert f"{begins}{len(left)} (ids {ids}); {why}" in " ".join(capsys.readouterr().err.split())
        assert read_pair(out / "drafter")["needs_training"] == left
        assert (
            f"Rows that were made and never trained: {len(left)} (ids {ids})"
            in (out / "drafter" / "README.md").read_text()
        )
    assert read_pair(draft)["needs_training"] == sorted([known, unknown])


# ---------------------------------------------------------------- the quantizer in the forward pass


@pytest.mark.parametrize("format_", ["nf4", "w4a16"])
def test_the_last_part_runs_on_4_bits_and_a_stopped_run_goes_on_alike(
    place: Path, rows: Rows, accelerator: Accelerator, tmp_path: Path, format_: Any
) -> None:
    """Before the part every figure is that of a run without it; in it the loss is the 4-bit copy's; evaluations always are."""
    quantizer = Quantizer(format_, 32)
    held = {"own": check_rows(open_answers(place / "held"), "own", **LIMITS)}
    part = {**BASE, "max_steps": 10, "eval_every": 5, "checkpoint_every": 3}
    with_part = Settings(**part, quantizer=quantizer, quantizer_from=0.5)
    model, plain = load_model(place / "draft"), load_model(place / "draft")
    fit(accelerator, plain, rows, held, Settings(**part), tmp_path / "plain")
    fit(accelerator, model, rows, held, with_part, tmp_path / "whole")
    whole, usual = (log_of(tmp_path / name) for name in ("whole", "plain"))
    assert whole[("train", 5)] == usual[("train", 5)]
    assert whole[("train", 6)]["loss"] != usual[("train", 6)]["loss"]
    assert whole[("eval", 0)] != usual[("eval", 0)]
    with quantized(model, quantizer):
        scores = score_prompts(accelerator, model, held["own"], batch_size=4, chunk=32)
    assert whole[("eval", 10)] == {"kind": "eval", "step": 10, "set": "own"} | summary(scores)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")  # as it was after step 6, in the part
    for step in ("step-000009", "step-000010"):
        shutil.rmtree(tmp_path / "stopped" / "checkpoints" / step, ignore_errors=True)
    again = load_model(place / "draft")
    fit(accelerator, again, rows, held, with_part, tmp_path / "stopped")
    assert log_of(tmp_path / "stopped") == whole
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))


def log_of(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows = read_jsonl(out / "metrics.jsonl")
    return {(r["kind"], r["step"]): {k: v for k, v in r.items() if k not in ("seconds", "tokens_per_s")} for r in rows}


@pytest.mark.parametrize(("format_", "more"), [("nf4", []), ("w4a16", ["quantizer_group_size=32"])])
def test_a_short_part_wins_back_what_4_bits_lose_and_the_drafter_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], format_: str, more: list[str]
) -> None:
    words = [
        f"data={place / 'train'}",
        f"heldout.own={place / 'held'}",
        "lr=3e-3",
        "batch_size=4",
        "threads=1",
        "--json",
    ]
    trained, won = tmp_path / "trained", tmp_path / "won"
    assert main([f"draft={place / 'draft'}", f"out={trained}", "max_steps=60", *words]) == 0
    words += [
        f"draft={trained / 'drafter'}",
        f"out={won}",
        "max_steps=30",
        f"quantizer={format_}",
        "quantizer_from=0",
        *more,
    ]
    capsys.readouterr()
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    first = next(r for r in read_jsonl(won / "metrics.jsonl") if r["kind"] == "eval")
    copy = result["sets"]["own"]["quantized"]
    assert first["top1"] < result["sets"]["own"]["before"]["top1"]  # what 4 bits lost
    assert copy["after"]["top1"] > first["top1"]
    assert copy["change"]["top1"][1] <= copy["change"]["top1"][0] <= copy["change"]["top1"][2]
    assert f"its 4-bit copy has top-1 agreement {copy['after']['top1']:.3f} on own" in result["verdict"]
    training = read_pair(won / "drafter")["training"]
    assert training["quantizer"] == format_
    assert training.get("quantizer_group_size") == (32 if more else None)
    kind, other = (Choice("nf4"), Choice("w4a16", group_size=32))[:: 1 if format_ == "nf4" else -1]
    assert not any("trained for" in note for note in plan_quantize(won / "drafter", kind)["notes"])
    assert any(
        f"trained for another copy than this one: format={format_}" in note
        for note in plan_quantize(won / "drafter", other)["notes"]
    )
    assert f"trained so that their {format_} copy" in (won / "drafter" / "README.md").read_text()


def test_what_a_quantizer_does_not_go_with_is_said_before_anything_is_read(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"draft={place / 'draft'}", f"data={place / 'train'}", f"out={tmp_path / 'out'}"]
    for more, message in (
        (["quantizer=nf4", "trainable=lora"], "adapters are merged into at the end only"),
        (["quantizer_from=0.5"], "quantizer_from is for quantizer=nf4 or w4a16"),
        (["quantizer=nf4", "quantizer_group_size=32"], "quantizer_group_size is for quantizer=w4a16"),
        (["quantizer=w4a16", "quantizer_group_size=128"], "no multiple of its group size 128"),
    ):
        with pytest.raises(InputError, match=message):
            main([*words, *more])
    assert not (tmp_path / "out").exists()


def test_tau_is_that_of_the_drafts_that_are_served(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts that are drawn: from answers drawn at 1, with the figures of their own w; from answers at another temperature none,
    and a line that says so; no best checkpoint where no set tells it."""
    for name, temperature in (("one", 1.0), ("warm", 0.7)):
        store(tmp_path / name, made_up([9, 14, 11], seed=5), place / "target", temperature=temperature)
    words = [
        f"draft={place / 'draft'}",
        f"data={place / 'train'}",
        f"out={tmp_path / 'out'}",
        "threads=1",
        "max_steps=1",
    ]
    words += [f"heldout.warm={tmp_path / 'warm'}", "draft_sample_method=probabilistic", "take=best"]
    with pytest.raises(
        InputError, match=r"^take=best goes by τ on the held-out sets: τ of drafts that are drawn .* 0\.7"
    ):
        main(words)
    capsys.readouterr()
    words.append(f"heldout.one={tmp_path / 'one'}")
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert "heldout.warm: τ of drafts that are drawn is not known" in said.err
    assert said.err.count("is not known") == 1
    warm, one = (result["sets"][name] for name in ("warm", "one"))
    assert (warm["after"]["tau"]["4"], warm["change"]["tau_4"]) == (None, [None] * 3)
    assert (warm["drafting"]["temperature"], one["drafting"]["note"]) == (0.7, None)
    assert "on warm, τ of drafts that are drawn is not known" in result["verdict"]
    rows = check_rows(open_answers(tmp_path / "one"), "one", **LIMITS)
    model = load_model(tmp_path / "out" / "drafter")
    taus = {}
    for method in ("greedy", "probabilistic"):
        how: dict[str, Any] = {"batch_size": 8, "draft_sample_method": method}
        taus[method] = summary(score_prompts(Accelerator(cpu=True), model, rows, **how))["tau"]["4"]
    assert one["after"]["tau"]["4"] == pytest.approx(taus["probabilistic"])
    assert taus["probabilistic"] != taus["greedy"]
    log = [r for r in read_jsonl(tmp_path / "out" / "metrics.jsonl") if r["kind"] == "eval" and r["set"] == "one"]
    assert log[-1]["tau"]["4"] == pytest.approx(taus["probabilistic"])
    assert read_pair(tmp_path / "out" / "drafter")["training"]["draft_sample_method"] == "probabilistic"
    assert main(words) == 0
    assert "acceptance length at K=4 not known -> not known" in capsys.readouterr().out
