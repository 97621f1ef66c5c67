"""What the drafter writes for itself: only the continuation counts, the same however rows are batched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill.answers import open_answers
from distill.batches import Batch, Rows, check_rows, collate
from distill.mask_blocks import Parallel
from distill.on_policy import _draw, continued
from distill.settings import Settings
from distill.signals import get_signal, online
from distill.step import _continued, optimizer_step, ready, window_gradients
from distill.student import supervised_hidden
from tests import tiny
from tests.stored_answers import made_up, store


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    place = tmp_path_factory.mktemp("place")
    target = tiny.folder(place / "target")
    answers = open_answers(store(place / "a", made_up([9, 5, 14], prompt_length=20), target))
    return check_rows(answers, "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)


def texts(batch: Batch) -> list[list[int]]:
    """Each row's prompt and the supervised tokens after it."""
    found = []
    for b in range(len(batch.ids)):
        at = batch.row_N == b
        found.append(
            [*batch.input_BL[b, : int(batch.column_N[at][0]) + 1].tolist(), *batch.signal.answer_N[at].tolist()]
        )
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_the_drafters_own_text(rows: Rows, temperature: float) -> None:
    """Greedily it is what the model's plain forward says token by token; drawn, every token has probability there."""
    model = tiny.model(layers=2, seed=3)
    batch = collate(rows, np.arange(3))
    new = continued(model, batch, tiny.REAL_TOKENS, 5, temperature)
    assert new.ids == batch.ids
    for b, text in enumerate(texts(new)):
        assert text[:20] == batch.input_BL[b, :20].tolist()  # the prompt
        assert 1 <= len(text) - 20 <= int((batch.row_N == b).sum())  # the answer that it replaces
        assert max(text) < tiny.REAL_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, :, : tiny.REAL_TOKENS]
        if temperature == 0:
            assert logits[19:-1].argmax(-1).tolist() == text[20:]
        assert 2 not in text[20:-1]  # it ends where it says its end
    assert (new.column_N >= 19).all()
    assert len(new.row_N) == len(new.column_N) == len(new.signal.answer_N)
    assert continued(model, batch, tiny.REAL_TOKENS, 6, 1.0).signal.answer_N.tolist() != new.signal.answer_N.tolist()


def test_the_same_in_any_batch(rows: Rows) -> None:
    """D11, D14: rows that are batched otherwise are answered alike."""
    model = tiny.model(layers=2, seed=3)
    together = texts(continued(model, collate(rows, np.arange(3)), tiny.REAL_TOKENS, 5, 1.0))
    alone = [texts(continued(model, collate(rows, np.array([i])), tiny.REAL_TOKENS, 5, 1.0))[0] for i in range(3)]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_of_parallel_drafting_is_never_written(rows: Rows, temperature: float) -> None:
    """A spare token as mask, which this drafter likes best, and the rest of what it says as without it."""
    batch, mask = collate(rows, np.arange(3)), 80
    model = tiny.says({mask: 0.6, 70: 0.3, 71: 0.1})

    def written(mask_id: int | None) -> list[int]:
        return continued(model, batch, tiny.REAL_TOKENS, 5, temperature, mask_id).signal.answer_N.tolist()

    assert mask in written(None)
    assert mask in written(tiny.REAL_TOKENS + 1), "a padding row as mask is past the real ids in any case"
    assert set(written(mask)) == ({70} if temperature == 0 else {70, 71})


def test_a_step_on_its_own_text_writes_no_mask(rows: Rows) -> None:
    mask = 80
    settings = Settings(
        seed=0, batch_size=4, accumulation=1, lr=1e-3, warmup=0.0, weight_decay=0.0, beta2=0.98, clip=1.0, trainable="all",
        losses={"forward_kl": 1.0}, chunk=32, epochs=None, max_steps=1, minutes=None, eval_every=1, eval_prompts=1,
        checkpoint_every=1, keep=1, on_policy=1.0, parallel=Parallel(3, mask),
    )  # fmt: skip
    accelerator, model = Accelerator(cpu=True), tiny.says({mask: 0.9, 70: 0.1})
    run = ready(accelerator, model, rows, settings, get_signal(rows, online(tiny.model(), "target", "cpu", "cpu")))
    batch = _continued(run, collate(rows, np.arange(3)), 0)
    assert set(batch.signal.answer_N.tolist()) == {70}


def test_the_target_scores_what_was_written(rows: Rows) -> None:
    target = online(tiny.model(layers=4), "target", "cpu", "cpu")
    new = continued(tiny.model(layers=2, seed=3), collate(rows, np.arange(3)), tiny.REAL_TOKENS, 5, 1.0)
    signal = get_signal(rows, target)(new)
    (text, *_) = texts(new)
    with torch.no_grad():
        logits = target.model(torch.tensor([text])).logits[0]
    ours = signal.hidden_NH @ signal.weight_VH.T  # type: ignore[union-attr]
    torch.testing.assert_close(ours[new.row_N == 0], logits[19:-1], rtol=1e-4, atol=1e-4)
    assert len(supervised_hidden(target.model, new)) == len(new.row_N)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(20000, 1)
    u = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(_draw(logits, u, 1.0), minlength=3) / 20000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.012)
    sharp = torch.bincount(_draw(logits, u, 0.5), minlength=3) / 20000
    torch.testing.assert_close(sharp, torch.tensor([0.25, 0.09, 0.04]) / 0.38, rtol=0, atol=0.012)
    assert _draw(logits[:2], torch.tensor([0.0, 1.0]), 1.0).tolist() == [0, 2]


def test_a_step_counts_what_was_written_not_what_it_replaces(rows: Rows) -> None:
    """A drafter that ends with a chance of .4 at every token: its answers are short, and the step's means are over their tokens.
    All it says is 70, with .6, and the end, so cross-entropy on them follows from the counts alone."""
    drafter = tiny.says({2: 0.4, 70: 0.6})
    at = Settings(
        seed=0, batch_size=2, accumulation=1, lr=1e-3, warmup=0.0, weight_decay=0.0, beta2=0.98, clip=1.0, trainable="all",
        losses={"jsd": 1.0}, chunk=None, epochs=None, max_steps=1, minutes=None, eval_every=1, eval_prompts=1,
        checkpoint_every=1, keep=1, on_policy=1.0,
    )  # fmt: skip
    target = online(tiny.model(), "target", "cpu", "cpu")
    run = ready(Accelerator(cpu=True), drafter, rows, at, get_signal(rows, target))
    window = np.arange(3)
    for step in range(3):
        written = continued(drafter, collate(rows, window), rows.real, at.seed + step, 1.0).signal.answer_N.tolist()
        assert len(written) < rows.supervised_P[window].sum()
        stats = window_gradients(run, window, {"jsd": 1.0}, step)
        assert stats["tokens"] == len(written)
        expected = -(written.count(2) * math.log(0.4) + written.count(70) * math.log(0.6)) / len(written)
        assert stats["cross_entropy"] == pytest.approx(expected, rel=1e-4)
    assert optimizer_step(run, window, 2, 0.0)["supervised"] == len(written)
