"""Options of a step: the same gradients where they should be, and what they change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.answers import open_answers
from distill.batches import Batch, check_rows, collate
from distill.mask_blocks import with_blocks
from distill.options import (
    SHORT,
    checkpoint_layers,
    compile_layers,
    decoder_autocast,
    exact_products,
    own_weights,
    short_attention,
)
from distill.student import freeze, supervised_hidden
from pairing.errors import InputError
from pairing.files import read_jsonl
from pairing.init import init_drafter
from pairing.source import load_model, resolve
from recipes import distill
from tests import tiny
from tests.stored_answers import made_up, store


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    place = tmp_path_factory.mktemp("place")
    store(place / "answers", made_up([3, 20, 7]), tiny.folder(place / "target"))
    rows = check_rows(open_answers(place / "answers"), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    return collate(rows, np.arange(3))


def kept_and_gradients(model: torch.nn.Module, batch: Batch) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that the forward pass keeps for the backward pass, and the gradients."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = supervised_hidden(model.train(), batch)
        loss = (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum()
    loss.backward()
    return kept, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("trainable", "masks"), [("all", 0), ("layers", 0), ("all", 3)])
def test_checkpointed_layers_keep_less_and_have_the_same_gradients(batch: Batch, trainable: str, masks: int) -> None:
    assert batch.shared > 0
    if masks:
        batch = with_blocks(batch, torch.full_like(batch.row_N, masks), tiny.REAL_TOKENS + 2)
    plain, checkpointed = tiny.model(layers=4), tiny.model(layers=4)
    for model in (plain, checkpointed):
        freeze(model, trainable)  # type: ignore[arg-type]
    most, expected = kept_and_gradients(plain, batch)
    checkpoint_layers(checkpointed)
    least, found = kept_and_gradients(checkpointed, replace(batch, shared=0))
    assert least < most / 3
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    checkpointed.eval()  # evaluation may share prefixes as before
    with torch.no_grad():
        torch.testing.assert_close(supervised_hidden(checkpointed, batch), supervised_hidden(plain.eval(), batch))


def test_bf16_is_for_the_matrix_products_alone(batch: Batch) -> None:
    model = tiny.model()
    with torch.no_grad():
        exact = supervised_hidden(model, batch)
        with decoder_autocast(torch.device("cpu"), bf16=False):
            assert torch.equal(supervised_hidden(model, batch), exact)
        with decoder_autocast(torch.device("cpu"), bf16=True):
            assert model.model.layers[0].mlp.up_proj(exact).dtype == torch.bfloat16
            rough = supervised_hidden(model, batch)
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough.float(), exact, rtol=0.1, atol=0.1)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_layers_are_compiled_one_by_one_when_they_first_run() -> None:
    """Compiling itself takes a minute and more on a busy machine: docs/scale.md has what it gave."""
    model = tiny.model()
    compile_layers(model)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    assert model.model._compiled_call_impl is None
    assert list(model.state_dict()) == list(tiny.model().state_dict())  # no renamed weights


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from Linux's /proc")
def test_freed_buffers_go_back_at_once() -> None:
    """Thirty buffers below glibc's own bound, with a small one after each, freed: they are no longer resident."""
    code = (
        "import sys, torch\n"
        "from distill.options import give_back_memory\n"
        "sys.argv[1] == 'back' and give_back_memory()\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "del (first := [torch.ones(31 * 2**18)])[0]\n"  # freeing one of 31 MiB is what raises the bound
        "before, small = resident(), []\n"
        "for _ in range(3):\n"
        "    large = [(torch.ones(20 * 2**18), small.append(torch.ones(2**12))) for _ in range(10)]\n"
        "    del large\n"
        "print((resident() - before) // 2**20)"
    )
    found = [
        int(subprocess.run([sys.executable, "-c", code, word], check=True, capture_output=True).stdout)
        for word in ("back", "as it is")
    ]
    assert found[0] < 10 < 100 < found[1]


@pytest.fixture
def precision() -> Iterator[None]:
    """A process has one; the next test finds it as it was."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_matmul_precision_is_the_runs_own_and_checks_are_exact(tmp_path: Path, precision: None) -> None:
    """Losses are those of exact products up to bfloat16's rounding, which some CPUs do there; a check that compares two ways
    to the same logits does without."""
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])
    store(tmp_path / "answers", made_up([3, 20, 7, 9]), target)
    losses = {}
    for name in ("highest", "medium"):
        words = [f"draft={tmp_path / 'draft'}", f"data={tmp_path / 'answers'}", f"out={tmp_path / name}", "max_steps=3"]
        assert distill.main([*words, "batch_size=2", "threads=1", f"matmul_precision={name}"]) == 0
        assert torch.get_float32_matmul_precision() == name
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        losses[name] = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses["medium"] == pytest.approx(losses["highest"], rel=0.02)
    with exact_products():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"


def test_another_matmul_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="matmul_precision"):
        distill.main([f"draft={tmp_path}", f"data={tmp_path}", f"out={tmp_path / 'out'}", "matmul_precision=low"])


def seen_by_the_last_mlp(model: torch.nn.Module, batch: Batch) -> tuple[list[int], dict[str, torch.Tensor]]:
    """How many positions it was given by each call of the decoder, and the gradients."""
    given: list[int] = []
    last = model.model.layers[-1].mlp.gate_proj  # type: ignore[union-attr, index]
    hook = last.register_forward_pre_hook(lambda _, args: given.append(args[0].shape[:-1].numel()))
    _, gradients = kept_and_gradients(model, batch)
    hook.remove()
    return given, gradients


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("masks", [0, 3])
def test_the_last_layers_mlp_runs_where_somebody_looks_alone(batch: Batch, shared: bool, masks: int) -> None:
    """Against whole rows through the model's own forward: the gradients are the same."""
    batch = batch if shared else replace(batch, shared=0)
    if masks:
        batch = with_blocks(batch, torch.full_like(batch.row_N, masks), tiny.REAL_TOKENS + 2)
    ours, checkpointed = (tiny.model(layers=3).double() for _ in range(2))
    checkpoint_layers(checkpointed)  # there it is left alone
    given, gradients = seen_by_the_last_mlp(ours, batch)
    whole, expected = seen_by_the_last_mlp(checkpointed, replace(batch, shared=0))
    assert given == [*([1] if batch.shared else []), len(batch.row_N)]  # nobody looks at a shared prefix
    assert set(whole) == {batch.input_BL.numel()}
    assert len(batch.row_N) < whole[0]
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), name  # norms round to float32
    assert "forward" not in vars(ours.model.layers[-1].mlp) or ours.model.layers[-1].mlp.forward.__name__ == "forward"


def test_an_mlp_that_also_gives_its_routers_choice_runs_whole(batch: Batch) -> None:
    """Experts of some architectures return a pair, which their layer takes apart."""
    plain, odd = tiny.model(layers=2), tiny.model(layers=2)
    layer = odd.model.layers[-1]
    inner, whole = layer.mlp.forward, layer.forward
    seen: list[torch.Size] = []

    def pair(hidden_BLH: torch.Tensor) -> tuple[torch.Tensor, str]:
        return inner(hidden_BLH), "choice"

    def apart(hidden_BLH: torch.Tensor, **more: Any) -> torch.Tensor:
        given = layer.mlp.forward

        def first(hidden_BLH: torch.Tensor) -> torch.Tensor:
            out, choice = given(hidden_BLH)
            assert choice == "choice"
            seen.append(out.shape)
            return out

        layer.mlp.forward = first
        try:
            return whole(hidden_BLH, **more)
        finally:
            layer.mlp.forward = given

    layer.mlp.forward, layer.forward = pair, apart
    batch = replace(batch, shared=0)
    with torch.no_grad():
        torch.testing.assert_close(supervised_hidden(odd, batch), supervised_hidden(plain, batch))
    assert [s[:-1] for s in seen] == [batch.input_BL.shape]


@pytest.mark.parametrize(
    ("precision", "columns", "math"), [("medium", SHORT, True), ("medium", SHORT + 1, False), ("highest", 8, False)]
)
def test_short_rows_attend_by_whole_products_where_products_are_onednns(
    precision: str, columns: int, math: bool
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with short_attention(tiny.model().model, torch.zeros(1, columns, dtype=torch.int64)):
            assert torch.backends.cuda.flash_sdp_enabled() is not math
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_attention_by_whole_products_is_the_same(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products as exact as before: what `medium` itself rounds is the machine's."""
    _, expected = kept_and_gradients(tiny.model(layers=3), batch)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    _, gradients = kept_and_gradients(tiny.model(layers=3), batch)
    assert not all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_weights_leave_their_mapped_file(tmp_path: Path) -> None:
    """They are what they were, a tied head is still tied, and what happens to the file is nothing to them."""
    folder = tiny.folder(tmp_path / "model")
    model = load_model(folder)
    before = {name: p.clone() for name, p in model.named_parameters()}
    mapped = {name for name, p in model.named_parameters() if p.data_ptr() % 64}
    assert mapped
    assert own_weights(model) is model
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    file = folder / "model.safetensors"
    with file.open("r+b") as f:
        f.seek(file.stat().st_size // 2)
        f.write(b"\xff" * (file.stat().st_size // 2))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
