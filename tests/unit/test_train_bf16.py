"""Training under accelerate's bf16, on the CPU: products in bfloat16, all that is kept in float32, and an exact resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from distill import train
from distill.answers import open_answers
from distill.batches import Rows, check_rows
from distill.settings import Settings
from distill.train import fit
from pairing.files import read_jsonl
from tests import tiny
from tests.stored_answers import answered, store

SETTINGS = Settings(
    seed=0, batch_size=4, accumulation=1, lr=1e-3, warmup=0.0, weight_decay=0.0, beta2=0.98, clip=1.0, trainable="all",
    losses={"forward_kl": 1.0, "cross_entropy": 0.1}, chunk=None, epochs=None, max_steps=3, minutes=None, eval_every=2,
    eval_prompts=4, checkpoint_every=2, keep=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A process's accelerators share their precision; the next test chooses its own."""
    yield
    AcceleratorState._reset_state()


def accelerator(precision: str) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, mixed_precision=precision)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    place = tmp_path_factory.mktemp("place")
    target = tiny.folder(place / "target", layers=3)
    answers = open_answers(store(place / "a", answered(target, 12, seed=1), target))
    return check_rows(answers, "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)


def run(rows: Rows, out: Path, precision: str) -> Any:
    model = tiny.model(layers=2, seed=3)
    fit(accelerator(precision), model, rows, {"own": rows}, SETTINGS, out)
    return model


def log_of(out: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(out / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in rows]


def test_losses_are_near_those_of_float32_and_what_is_kept_is_float32(rows: Rows, tmp_path: Path) -> None:
    model = run(rows, tmp_path / "bf16", "bf16")
    run(rows, tmp_path / "no", "no")
    rough, exact = ([row for row in log_of(tmp_path / name) if row["kind"] == "train"] for name in ("bf16", "no"))
    assert [row["loss"] for row in rough] == pytest.approx([row["loss"] for row in exact], rel=0.02)
    assert all(a["loss"] != b["loss"] for a, b in zip(rough, exact, strict=True))  # it was bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for file in ("weights", "optimizer"):
        held = load_file(tmp_path / "bf16" / "checkpoints" / "step-000003" / f"{file}.safetensors")
        assert {t.dtype for t in held.values()} == {torch.float32}


def test_a_run_in_bf16_that_was_killed_goes_on_bit_by_bit(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(rows, tmp_path / "whole", "bf16")
    step = train.optimizer_step

    def dies(run: Any, window: Any, at: int, progress: float) -> dict[str, Any]:
        if at == 2:
            raise KeyboardInterrupt
        return step(run, window, at, progress)

    with monkeypatch.context() as patched:
        patched.setattr(train, "optimizer_step", dies)
        with pytest.raises(KeyboardInterrupt):
            run(rows, tmp_path / "killed", "bf16")
    again = run(rows, tmp_path / "killed", "bf16")
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "whole")
    for (name, ours), theirs in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
