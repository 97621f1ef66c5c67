"""Mask blocks: each is what a round alone would be, in values and gradients; what is drawn, what it is taught, what it weighs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from distill.adapters import attach
from distill.answers import open_answers
from distill.batches import Batch, Rows, check_rows, collate
from distill.head import Head, head_loss
from distill.losses import FullSignal
from distill.mask_blocks import Parallel, drawn, reach_weights, signal_of, window_of, with_blocks
from distill.options import decoder_autocast
from distill.settings import Settings
from distill.signals import get_signal, online
from distill.step import ready, window_gradients
from distill.student import freeze, supervised_hidden
from pairing.errors import InputError
from tests import architectures, tiny
from tests.stored_answers import answered, made_up, store, two_turns

MASK = tiny.REAL_TOKENS + 2  # a padding row
LENGTHS = [3, 12, 1, 7]
LIMITS = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def rows(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = store(tmp_path_factory.mktemp("answers") / "a", made_up(LENGTHS), target)
    return check_rows(open_answers(folder), "data", **LIMITS)


@pytest.fixture(scope="module")
def turns(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = store(tmp_path_factory.mktemp("answers") / "t", two_turns([(3, 5), (1, 1), (7, 2)]), target)
    return check_rows(open_answers(folder), "data", **LIMITS)


def alone(model: Any, batch: Batch) -> torch.Tensor:
    """Hidden states [N, H] with every position's block run by itself: prefix, then masks, an ordinary causal sequence."""
    assert batch.blocks is not None
    plain, found = batch.blocks.plain, []
    for n in range(len(batch.row_N)):
        row, column = int(batch.row_N[n]), int(batch.column_N[n])
        masks, width = 0, plain.input_BL.shape[1]
        if column >= width:
            masks = int(batch.blocks.offset_BM[row, column - width])
            column = int(batch.blocks.start_BM[row, column - width])
        ids = [*plain.input_BL[row, : column + 1].tolist(), *[MASK] * masks]
        found.append(model.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize("kind", [*architectures.CLASSES, "sliding"])
def test_a_block_among_others_is_the_block_alone(rows: Rows, turns: Rows, kind: str) -> None:
    """The attention mask and positions against a slow reference, for every architecture that `init` cuts."""
    if kind == "sliding":
        model = architectures.model("mistral").double()
        model.config.sliding_window = model.model.config.sliding_window = 9
    else:
        model = architectures.model(kind).double()
    for source in (rows, turns):
        batch = collate(source, np.arange(len(source)))
        blocks = with_blocks(batch, torch.full_like(batch.row_N, 4), MASK)
        assert batch.shared > 0
        for one in (blocks, replace(blocks, shared=0)):
            with torch.no_grad():
                torch.testing.assert_close(supervised_hidden(model, one), alone(model, one), rtol=1e-5, atol=1e-5)


def test_which_kinds_of_layers_are_trained_with_masks() -> None:
    """A decoder of two kinds has no one attention mask, whatever the drafter's window is."""
    full, sliding = "full_attention", "sliding_attention"
    for kinds, window in (([full, full], None), ([sliding, sliding], 9), (None, 9)):
        assert window_of(SimpleNamespace(layer_types=kinds, sliding_window=9)) == window
    for kinds in ([full, sliding], ["chunked_attention"]):
        with pytest.raises(
            InputError, match=f"has layers of the kinds {', '.join(kinds)}, and masks are trained where"
        ):
            window_of(SimpleNamespace(layer_types=kinds, sliding_window=9))


def test_in_bf16_a_block_among_others_is_the_block_alone(rows: Rows) -> None:
    """About as far from it as rounding alone puts that from float32; who sees what it should not is much further."""
    model, batch = tiny.model(layers=3), collate(rows, np.arange(len(rows)))
    batch = with_blocks(batch, torch.full_like(batch.row_N, 4), MASK)
    with torch.no_grad():
        exact = alone(model, batch)
        with decoder_autocast(torch.device("cpu"), bf16=True):
            found, expected = supervised_hidden(model, batch), alone(model, batch)
    assert not torch.equal(expected, exact)
    rounding = float((expected - exact).norm())
    assert float((found - expected).norm()) < 1.5 * rounding < 0.1 * float(exact.norm())


@pytest.mark.parametrize("learns", ["all", "lora"])
def test_gradients_are_those_of_the_blocks_alone(rows: Rows, learns: str) -> None:
    batch = collate(rows, np.arange(len(rows)))
    batch, found = with_blocks(batch, torch.full_like(batch.row_N, 3), MASK), []
    for run in (supervised_hidden, alone):
        model = tiny.model(layers=3).double()
        params = freeze(model, "all") if learns == "all" else adapted(model)
        hidden = run(model, batch)
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum().backward()
        found.append([p.grad for _, p in params if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def adapted(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """LoRA on all of it, moved from its beginning, where half of its gradients are 0; the same each time."""
    params, generator = attach(model, rank=4, alpha=8, vocabulary=True), torch.Generator().manual_seed(3)
    model.double()
    with torch.no_grad():
        for _, p in params:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return params


def test_plain_positions_are_untouched_by_masks(rows: Rows) -> None:
    """Drafting one by one is what it was: nothing sees a mask from outside its block."""
    model, plain = tiny.model(layers=3).double(), collate(rows, np.arange(len(rows)))
    blocks = with_blocks(plain, torch.full_like(plain.row_N, 4), MASK)
    hidden = supervised_hidden(model, blocks)[: len(plain.row_N)]
    torch.testing.assert_close(hidden, supervised_hidden(model, plain), rtol=1e-5, atol=1e-5)


def test_a_mask_is_taught_the_token_that_it_stands_for(turns: Rows) -> None:
    """Offset i of the block at column t predicts token t + i + 1 with the signal recorded there; no further than its answer."""
    batch = collate(turns, np.arange(len(turns)))
    plain = len(batch.row_N)
    blocks = with_blocks(batch, torch.full_like(batch.row_N, 3), MASK)
    assert blocks.blocks is not None
    seen = set()
    for n in range(plain, len(blocks.row_N)):
        row, place = int(blocks.row_N[n]), int(blocks.column_N[n]) - batch.input_BL.shape[1]
        start, offset = int(blocks.blocks.start_BM[row, place]), int(blocks.blocks.offset_BM[row, place])
        text, spans = turns.data[row]["input_ids"], turns.data[row]["spans"].reshape(-1, 2).tolist()
        (span,) = [(a, b) for a, b in spans if a <= start < b]  # never a prompt's last token
        assert span[0] <= start < start + offset + 1 < span[1]
        assert int(blocks.signal.answer_N[n]) == int(text[start + offset + 1])
        assert blocks.blocks.offset_N[n] == offset
        same = int(blocks.blocks.source_N[n])
        assert blocks.signal.head_logp_NK[n].tolist() == batch.signal.head_logp_NK[same].tolist()
        assert int(batch.column_N[same]) == start + offset
        before = int(blocks.blocks.before_N[n])
        assert (before < plain) == (offset == 1)
        assert int(blocks.blocks.offset_N[before]) == offset - 1
        seen.add((row, start, offset))
    expected = {
        (row, start, i)
        for row in range(len(turns))
        for a, b in turns.data[row]["spans"].reshape(-1, 2).tolist()
        for start in range(a, b)
        for i in range(1, min(3, b - 2 - start) + 1)
    }
    assert seen == expected
    assert bool((blocks.input_BL[:, batch.input_BL.shape[1] :] == MASK).all())


def test_online_a_mask_is_taught_what_the_target_alone_says_there(turns: Rows) -> None:
    """Of every position the target's distribution is that of the target run by itself on the text up to the token before."""
    target = online(tiny.model(layers=3, seed=5).double(), "target", "cpu", "cpu")
    batch = collate(turns, np.arange(len(turns)))
    batch, width = with_blocks(batch, torch.full_like(batch.row_N, 3), MASK), batch.input_BL.shape[1]
    assert batch.blocks is not None
    signal = signal_of(get_signal(turns, target))(batch)
    assert isinstance(signal, FullSignal)
    logits_NV = signal.hidden_NH @ signal.weight_VH.T
    for n in range(len(batch.row_N)):
        row, column = int(batch.row_N[n]), int(batch.column_N[n])
        if column >= width:
            column -= width
            column = int(batch.blocks.start_BM[row, column] + batch.blocks.offset_BM[row, column])
        text = torch.tensor(turns.data[row]["input_ids"].tolist())
        with torch.no_grad():
            expected = target.model(text[None, : column + 1]).logits[0, -1]
        torch.testing.assert_close(logits_NV[n], expected, rtol=1e-5, atol=1e-5)
        assert int(signal.answer_N[n]) == int(text[column + 1])


def test_draws_are_nested_have_their_shares_and_do_not_depend_on_the_batch(target: Path, tmp_path: Path) -> None:
    answers = store(tmp_path / "a", made_up([120] * 24), target)
    rows, parallel = check_rows(open_answers(answers), "data", **LIMITS), Parallel(5, MASK, keep=0.6, least=0.3)
    assert parallel.shares == pytest.approx([0.6, 0.36, 0.3, 0.3])
    together = drawn(collate(rows, np.arange(24)), parallel, seed=7)
    assert together.blocks is not None
    counts = torch.bincount(together.blocks.offset_N)[1:]
    starts = 24 * torch.tensor([118, 117, 116, 115])  # those behind which the answer is long enough
    torch.testing.assert_close(counts / starts, torch.tensor(parallel.shares), rtol=0, atol=0.03)
    assert counts[2] >= counts[3] > 0  # one draw decides both: where offset 4 is, 3 is
    again = drawn(collate(rows, np.arange(24)), parallel, seed=8)
    assert again.input_BL.shape != together.input_BL.shape or not torch.equal(again.column_N, together.column_N)
    for i in (0, 5):
        one = drawn(collate(rows, np.array([i])), parallel, seed=7)
        assert one.blocks is not None
        mine = together.blocks.offset_BM[i] > 0
        assert together.blocks.start_BM[i][mine].tolist() == one.blocks.start_BM[0].tolist()
        assert together.blocks.offset_BM[i][mine].tolist() == one.blocks.offset_BM[0].tolist()


def test_weights_are_the_chance_of_being_reached_by_hand(rows: Rows) -> None:
    """An answer of 7 tokens has blocks of 3, 3, 3, 2 and 1 masks."""
    batch = collate(rows, np.flatnonzero(rows.supervised_P == 7))
    blocks = with_blocks(batch, torch.full_like(batch.row_N, 3), MASK).blocks
    assert blocks is not None
    w = torch.tensor(
        [0.9, 0.5, 1.0, 0.0, 1.0, 1.0, 1.0] + [0.8, 0.4, 0.2] + [0.1, 1.0, 1.0] + [1.0] * 3 + [0.5, 0.5] + [0.3]
    )
    kept = Parallel(4, MASK, keep=0.5, least=0.25)  # offsets 1, 2, 3 at 0.5, 0.25, 0.25
    expected = torch.tensor(
        [1.0] * 7
        + [0.5 / 0.5, 0.5 * 0.8 / 0.25, 0.5 * 0.8 * 0.4 / 0.25]
        + [1.0 / 0.5, 0.1 / 0.25, 0.1 / 0.25]
        + [0.0] * 3
        + [1.0 / 0.5, 0.5 / 0.25]
        + [1.0 / 0.5]
    )
    torch.testing.assert_close(reach_weights(w, blocks, kept), expected)
    torch.testing.assert_close(reach_weights(w[:9], blocks, kept), expected[:9])  # a chunk's end


def test_loss_of_a_masked_batch_by_hand(rows: Rows) -> None:
    """KL with one bucket at every position, summed: from the blocks run alone, and the whole softmax."""
    model, batch = tiny.model(layers=2).double(), collate(rows, np.array([0, 3]))
    batch = with_blocks(batch, torch.full_like(batch.row_N, 2), MASK)
    weight = model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        got, _ = head_loss(
            supervised_hidden(model, batch), weight, batch.signal, {"forward_kl": 1.0}, Head(rows.real, 4)
        )
        q_NV = (alone(model, batch) @ weight[: rows.real].T).softmax(-1)
    total = 0.0
    for n in range(len(batch.row_N)):
        p_K, q_K = batch.signal.head_logp_NK[n].double().exp(), q_NV[n, batch.signal.head_ids_NK[n]]
        tail = float(batch.signal.tail_N[n])
        total += float((p_K * (p_K / q_K).log()).sum()) + tail * float(np.log(tail / (1 - float(q_K.sum()))))
    assert float(got) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("survival", [None, "probabilistic"])
def test_the_loss_of_a_window_by_hand(target: Path, tmp_path: Path, survival: Any) -> None:
    """One answer of 4 tokens has blocks of 2 masks and of 1: seven losses, a mask's times reach / share, over seven. Held against
    the window's gradient, as its log has the plain means."""
    folder = store(tmp_path / "a", answered(target, 1, seed=1, longest=4), target)
    rows, kept = check_rows(open_answers(folder), "data", **LIMITS), Parallel(3, MASK, keep=0.5, least=0.25)
    plain = collate(rows, np.array([0]))
    seed = next(s for s in range(999) if len(drawn(plain, kept, s).row_N) == 7)  # that drops none
    found, exact = moved(tiny.model()), moved(tiny.model()).double()
    params, exact_params = freeze(found, "all"), freeze(exact, "all")
    run = ready(
        Accelerator(cpu=True), found, rows, settings(seed=seed, parallel=kept, survival=survival), get_signal(rows)
    )
    stats = window_gradients(run, np.array([0]), {"forward_kl": 1.0}, 0)

    batch = drawn(plain, kept, seed)
    p_NK, tail_N = batch.signal.head_logp_NK.double().exp(), batch.signal.tail_N.double()
    q_NV = (alone(exact, batch) @ exact.get_output_embeddings().weight[: rows.real].T).softmax(-1)
    q_NK = q_NV.gather(-1, batch.signal.head_ids_NK)
    rest_N = 1 - q_NK.sum(-1)
    kl_N = (p_NK * (p_NK / q_NK).log()).sum(-1) + tail_N * (tail_N / rest_N).log()
    w = (torch.minimum(p_NK, q_NK).sum(-1) + torch.minimum(tail_N, rest_N)).tolist()
    assert all(0.05 < w[n] < 0.95 for n in (1, 2, 4)), w  # so that every factor tells
    factors = [1.0] * 4 + [w[1] / 0.5, w[1] * w[4] / 0.25, w[2] / 0.5]
    loss = (torch.tensor([1.0] * 7 if survival is None else factors).double() * kl_N).sum() / 7
    loss.backward()

    assert (stats["tokens"], stats["masks"]) == (4, 3)
    assert stats["forward_kl"] == pytest.approx(float(kl_N.detach().mean()), rel=1e-4)
    for (name, p), (_, q) in zip(params, exact_params, strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-5 * float(q.grad.abs().max()))


def moved(model: Any) -> Any:
    """The target's own weights with noise: a drafter that agrees with it in part."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * p.std() * torch.randn(p.shape, generator=generator))
    return model


def settings(**more: Any) -> Settings:
    return Settings(
        batch_size=4, accumulation=1, lr=1e-3, warmup=0.1, weight_decay=0.0, beta2=0.98, clip=1.0, trainable="all",
        losses={"forward_kl": 1.0}, chunk=None, epochs=None, max_steps=1, minutes=None, eval_every=9, eval_prompts=1,
        checkpoint_every=9, keep=1, **more,
    )  # fmt: skip
