"""Batches: what is supervised, the signal at those positions, order and split (D11, D14), refusals (D10)."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from distill.answers import Answers, open_answers
from distill.batches import Rows, answer_lengths, check_rows, collate, micro_batches, to_device, windows
from distill.losses import FullSignal
from distill.prompts import prompt
from distill.signals import get_signal, online, require_plain_target
from distill.student import freeze, require_plain_head, supervised_hidden
from pairing.errors import InputError
from tests import tiny
from tests.stored_answers import SYSTEM, K, made_up, store, two_turns

LENGTHS = [3, 50, 7, 120, 1, 9]
LIMITS = {"rows": tiny.ROWS, "real": tiny.REAL_TOKENS, "context": 512}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def rows(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = store(tmp_path_factory.mktemp("answers") / "a", made_up(LENGTHS), target)
    return check_rows(open_answers(folder), "data", **LIMITS)


def test_supervised_are_the_answers_and_nothing_else(rows: Rows) -> None:
    batch = collate(rows, np.arange(len(rows)))
    assert len(batch.row_N) == sum(LENGTHS)
    assert rows.share == pytest.approx(sum(LENGTHS) / (sum(LENGTHS) + 20 * len(LENGTHS)))
    for b in range(len(rows)):
        answer = rows.data[b]["input_ids"][20:].tolist()
        at = batch.row_N == b
        columns = batch.column_N[at]
        assert batch.signal.answer_N[at].tolist() == answer  # the ending token among them
        assert columns.tolist() == list(range(19, 19 + len(answer)))  # a column predicts the token after it
        assert batch.input_BL[b, columns[1:]].tolist() == answer[:-1]
        np.testing.assert_array_equal(batch.signal.head_ids_NK[at].ravel(), rows.data[b]["head_ids"])
        np.testing.assert_array_equal(batch.signal.tail_N[at], rows.data[b]["tail_mass"])
    mass = batch.signal.head_logp_NK.exp().sum(-1) + batch.signal.tail_N
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=2e-3)  # 16-bit logs, never renormalised


def test_shared_columns_are_equal_and_leave_every_supervised_one(rows: Rows) -> None:
    batch = collate(rows, np.arange(len(rows)))
    assert batch.shared >= len(SYSTEM)
    assert (batch.input_BL[:, : batch.shared] == batch.input_BL[:1, : batch.shared]).all()
    assert batch.shared <= batch.column_N.min()
    assert collate(rows, np.array([3])).shared == 0


def test_two_answers_in_a_row(target: Path, tmp_path: Path) -> None:
    """Every token of both answers is supervised, the question between them is not; drawn ids come along."""
    lengths = [(3, 5), (1, 1), (7, 2)]
    answers = two_turns(lengths, tail=2)
    rows = check_rows(open_answers(store(tmp_path / "a", answers, target)), "data", **LIMITS)
    by_id = {a.prompt.id: a for a in answers}
    assert sorted(rows.supervised_P.tolist()) == [2, 8, 9]
    assert sorted(rows.tokens_P.tolist()) == [27, 33, 34]
    batch = collate(rows, np.arange(3))
    assert batch.signal.tail_ids_NM is not None
    assert batch.signal.tail_logp_NM is not None
    assert 0 < batch.shared <= 19  # up to the first answer of any row
    for b, id_ in enumerate(batch.ids):
        one, at = by_id[id_], (batch.row_N == b).numpy()
        (s0, e0), (s1, e1) = one.spans
        assert batch.column_N[at].tolist() == [*range(s0 - 1, e0 - 1), *range(s1 - 1, e1 - 1)]
        assert batch.signal.answer_N[at].tolist() == one.input_ids[s0:e0] + one.input_ids[s1:e1]
        assert batch.input_BL[b, : len(one.input_ids) - 1].tolist() == one.input_ids[:-1]
        assert batch.signal.head_ids_NK[at].tolist() == one.head_ids_NK.tolist()
        assert one.tail_ids_NM is not None
        assert one.tail_logprobs_NM is not None
        assert batch.signal.tail_ids_NM[at].tolist() == one.tail_ids_NM.tolist()
        np.testing.assert_allclose(batch.signal.tail_logp_NM[at], one.tail_logprobs_NM, rtol=2**-11)
        assert answer_lengths(rows, b) == [e0 - s0, e1 - s1]
    assert to_device(batch, "meta").signal.tail_ids_NM.device.type == "meta"  # type: ignore[union-attr]
    plain = replace(batch, shared=0)
    model = tiny.model(layers=2).double()
    torch.testing.assert_close(supervised_hidden(model, batch), supervised_hidden(model, plain), rtol=1e-5, atol=1e-5)


def test_what_rows_share_ends_before_their_first_answer(target: Path, tmp_path: Path) -> None:
    """Two conversations that differ in their last token only: still none of the supervised columns is shared."""
    (one,) = two_turns([(6, 5)])
    other = replace(one, prompt=prompt([{"role": "user", "content": "again"}]), input_ids=[*one.input_ids[:-1], 7])
    batch = collate(
        check_rows(open_answers(store(tmp_path / "a", [one, other], target)), "data", **LIMITS), np.arange(2)
    )
    assert batch.shared == batch.column_N.min() == 19


def test_spans_or_draws_that_cannot_be(target: Path, tmp_path: Path) -> None:
    good = open_answers(store(tmp_path / "a", two_turns([(3, 5)], tail=2), target))

    def said(**row: list[int]) -> str:
        with pytest.raises(InputError) as e:
            check_rows(Answers(good.meta, good.data.map(lambda old: old | row, keep_in_memory=True)), "data", **LIMITS)
        return str(e.value)

    for spans in ([20, 23, 28, 28], [20, 29, 28, 33], [20, 23, 28, 32]):
        assert f"has answers at {spans} of 33 tokens, one of them empty or out of place" in said(spans=spans)
    assert "lacks part of its recorded distribution" in said(tail_ids=[7] * 15)
    assert "lacks part of its recorded distribution" in said(tail_ids=[tiny.REAL_TOKENS] * 16)


def test_hidden_states_with_a_shared_prefix_are_the_plain_ones_gradients_too(rows: Rows) -> None:
    batch = collate(rows, np.arange(len(rows)))
    plain = type(batch)(batch.ids, batch.input_BL, 0, batch.row_N, batch.column_N, batch.signal)
    found = []
    for b in (batch, plain):
        model = tiny.model(layers=3).double()
        params = freeze(model, "all")
        hidden = supervised_hidden(model, b)
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum().backward()
        found.append((hidden.detach(), [p.grad for _, p in params if p.grad is not None]))
    assert batch.shared > 0
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert len(found[0][1]) == len(found[1][1]) > 20
    for got, expected in zip(found[0][1], found[1][1], strict=True):
        # the model's norms compute in float32 whatever its type
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


SMALL: dict[str, Any] = {
    "vocab_size": tiny.ROWS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 512,
}  # fmt: skip
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("Mistral", {"num_hidden_layers": 3}),
    "every other": ("Gemma3", {"num_hidden_layers": 4, "head_dim": 32,
                               "layer_types": ["sliding_attention", "full_attention"] * 2}),
}  # fmt: skip
HYBRID: dict[str, dict[str, Any]] = {
    "Qwen3Next": {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "FalconH1": {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "Jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
}  # fmt: skip


def made(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config)(**SMALL, **more)).float().eval()


@pytest.mark.parametrize("kind", list(WINDOWED))
def test_a_prefix_longer_than_a_sliding_window_is_shared_exactly(rows: Rows, kind: str) -> None:
    """Hidden states and gradients of a window of 5 columns with more than twice as many shared; a wider one has others."""
    batch = collate(rows, np.arange(len(rows)))
    assert batch.shared > 10
    found = []
    for window, b in ((5, batch), (5, replace(batch, shared=0)), (500, replace(batch, shared=0))):
        name, more = WINDOWED[kind]
        model = made(name, **more, sliding_window=window).double()
        params = freeze(model, "all")
        hidden = supervised_hidden(model, b)
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum().backward()
        found.append((hidden.detach(), [p.grad for _, p in params if p.grad is not None]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert len(found[0][1]) == len(found[1][1]) > 20
    for got, expected in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(found[1][0], found[2][0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", list(HYBRID))
def test_an_online_target_with_linear_attention_runs_whole_rows(rows: Rows, kind: str) -> None:
    """Its layers hand on a state that no two rows can share; what it says is what it says of each row alone."""
    target = online(made(kind, **HYBRID[kind]), "target", "cpu", "cpu")
    batch = collate(rows, np.arange(len(rows)))
    assert batch.shared > 0
    require_plain_target(target, batch)
    signal = get_signal(rows, target)(batch)
    assert isinstance(signal, FullSignal)
    ours_NV = signal.hidden_NH @ signal.weight_VH.T
    with torch.no_grad():
        for b in range(len(rows)):
            at = batch.row_N == b
            whole_LV = target.model(torch.from_numpy(rows.data[b]["input_ids"][None, :-1]).long()).logits[0]
            torch.testing.assert_close(ours_NV[at], whole_LV[batch.column_N[at]], rtol=1e-3, atol=1e-3)


def test_no_layer_keeps_what_it_has_read(rows: Rows) -> None:
    """Of the columns beyond the shared ones no later layer finds keys in the cache; so they are gone, and the cache with them."""
    batch, model = collate(rows, np.arange(len(rows))), tiny.model(layers=3)
    found: list[tuple[int, int]] = []
    caches = []

    def last(_module: object, _args: object, kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"] is not None:
            cache = kwargs["past_key_values"]
            caches.append(weakref.ref(cache))
            found.append((cache.layers[0].keys.shape[-2], cache.layers[0].keys.untyped_storage().nbytes()))

    model.get_decoder().layers[-1].register_forward_pre_hook(last, with_kwargs=True)
    with torch.no_grad():
        supervised_hidden(model, batch)
    (_, prefix), (columns, rest) = found
    assert columns == batch.shared
    assert rest == prefix  # one row's keys, whatever the batch
    assert caches[-1]() is None  # no circle holds it


def test_rows_do_not_see_each_other_nor_their_padding(rows: Rows) -> None:
    model = tiny.model(layers=3).double()
    together = supervised_hidden(model, collate(rows, np.arange(len(rows))))
    alone = [supervised_hidden(model, collate(rows, np.array([i]))) for i in range(len(rows))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_changes_its_logits_is_refused(rows: Rows, dtype: torch.dtype) -> None:
    """And one that does not is taken, in 16 bits too: rounding is no change."""
    batch = collate(rows, np.arange(2))
    model = tiny.model(layers=8).to(dtype)
    require_plain_head(model, batch)
    forward = model.forward

    def capped(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = 5 * torch.tanh(out.logits / 5)
        return out

    model.forward = capped
    with pytest.raises(InputError, match="changes its logits after the head"):
        require_plain_head(model, batch)


@pytest.mark.parametrize("count", [64, 61])
def test_every_row_once_per_epoch_by_seed_and_epoch_only(target: Path, tmp_path: Path, count: int) -> None:
    """D14: no state but (seed, epoch), so a new process goes on in the same order."""
    lengths = np.random.default_rng(0).integers(1, 60, count).tolist()
    rows = check_rows(open_answers(store(tmp_path / "a", made_up(lengths), target)), "data", **LIMITS)
    first = windows(rows, 0, 0, 4)
    assert sorted(np.concatenate(first).tolist()) == list(range(count))
    assert [len(w) for w in first] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    assert all(np.array_equal(a, b) for a, b in zip(first, windows(rows, 0, 0, 4), strict=True))
    for seed, epoch in ((1, 0), (0, 1)):
        assert any(not np.array_equal(a, b) for a, b in zip(first, windows(rows, seed, epoch, 4), strict=True))


def test_windows_hold_rows_of_similar_length_in_mixed_order(target: Path, tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 128).tolist()
    rows = check_rows(open_answers(store(tmp_path / "a", made_up(lengths), target)), "data", **LIMITS)
    found = windows(rows, 0, 0, 4)
    spread = np.mean([np.ptp(rows.supervised_P[w]) for w in found])
    assert spread < 8  # of 59; random windows have about 35
    means = np.array([rows.supervised_P[w].mean() for w in found])
    assert abs(np.corrcoef(means[:16], np.arange(16))[0, 1]) < 0.7


@pytest.mark.parametrize(("batch_size", "ranks"), [(4, 1), (1, 1), (2, 2), (1, 2), (1, 3)])
def test_a_window_is_split_without_loss(batch_size: int, ranks: int) -> None:
    """D11: all ranks together hold each row once; on a short window a rank may hold none."""
    for window in (np.array([5, 2, 9, 4]), np.array([7])):
        parts = [micro_batches(window, batch_size, rank, ranks) for rank in range(ranks)]
        assert all(len(piece) <= batch_size for part in parts for piece in part)
        assert sorted(i for part in parts for piece in part for i in piece) == sorted(window.tolist())


def test_padding_ids_in_the_target_give_their_mass_to_no_one(target: Path, tmp_path: Path) -> None:
    """D1, D10: target and drafter are both cut to the real vocabulary."""
    (answer,) = made_up([2])
    answer.head_ids_NK[:, 1] = tiny.REAL_TOKENS + 3
    rows = check_rows(open_answers(store(tmp_path / "a", [answer], target)), "data", **LIMITS)
    signal = collate(rows, np.array([0])).signal
    p = np.exp(answer.head_logprobs_NK.astype(np.float64))
    np.testing.assert_allclose(signal.head_logp_NK.exp()[:, 0], p[:, 0] / (1 - p[:, 1]), rtol=2e-3)
    assert signal.head_logp_NK.exp()[:, 1].tolist() == [0, 0]
    mass = signal.head_logp_NK.exp().sum(-1) + signal.tail_N
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=2e-3)


def refusal(target: Path, folder: Path, answers: list, **limits: int) -> str:  # type: ignore[type-arg]
    with pytest.raises(InputError) as e:
        check_rows(open_answers(store(folder, answers, target)), "data (here)", **{**LIMITS, **limits})
    assert "\n" not in str(e.value)
    return str(e.value)


def test_refusals_name_the_row_and_the_fix(target: Path, tmp_path: Path) -> None:
    """D10 and the bad inputs of the data: one line each."""
    answers = made_up([5, 90])
    long = answers[1].prompt.id
    said = refusal(target, tmp_path / "long", answers, context=100)
    assert long in said
    assert "context of 100" in said
    said = refusal(target, tmp_path / "rows", answers, rows=288)
    assert f"{tiny.ROWS} vocabulary rows, the draft 288" in said
    assert "`draftsmith repair` gives a draft of the same tokenizer the target's rows, else" in said
    assert "draftsmith init" in said
    wrong = made_up([4, 4], seed=1)
    wrong[1].input_ids[22] = tiny.REAL_TOKENS
    said = refusal(target, tmp_path / "ids", wrong)
    assert wrong[1].prompt.id in said
    assert "draftsmith check" in said
    some = open_answers(store(tmp_path / "empty", made_up([4, 0], seed=2), target))
    with pytest.raises(InputError, match="nothing to learn"):
        check_rows(Answers(some.meta, some.data.filter(lambda row: not row["spans"])), "data", **LIMITS)


def test_an_empty_answer_beside_others_is_left_out(target: Path, tmp_path: Path) -> None:
    rows = check_rows(open_answers(store(tmp_path / "a", made_up([4, 0, 6]), target)), "data", **LIMITS)
    kept = np.concatenate(windows(rows, 0, 0, 2))
    assert sorted(rows.supervised_P[kept].tolist()) == [4, 6]
    assert rows.head == K
