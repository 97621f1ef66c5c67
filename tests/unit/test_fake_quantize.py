"""The quantizer in the forward pass: its values are those that the 4-bit copy has, and gradients go straight through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill.fake_quantize import (
    Quantizer,
    linear_weights,
    quantized,
    require_whole,
    w4a16,
)
from distill.quantize import Choice, linear_layers, quantize_drafter
from distill.w4a16 import codes_of, scales_of
from pairing.errors import InputError
from pairing.init import init_drafter
from pairing.source import load_model, resolve
from pairing.weights import read_headers
from tests import tiny

BOTH = [Quantizer("nf4"), Quantizer("w4a16", 32)]


def make_drafter(tmp_path: Path, dtype: str = "float32", **kwargs: Any) -> Path:
    target = tiny.folder(tmp_path / "target", layers=3, **kwargs)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 2], dtype)
    return tmp_path / "drafter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4_is_what_quantize_writes_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    drafter = make_drafter(tmp_path, dtype)
    quantize_drafter(drafter, tmp_path / "nf4")
    written, model = load_file(tmp_path / "nf4" / "model.safetensors"), load_model(drafter)
    with quantized(model, Quantizer("nf4", dtype=getattr(torch, dtype))):
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert sum(written[name].dtype == torch.uint8 for name in trained) == 14
    for name, weight in trained.items():
        stored = written[name]
        if stored.dtype == torch.uint8:
            state = {k.removeprefix(f"{name}."): v for k, v in written.items() if k.startswith(f"{name}.")}
            stored = dequantize_4bit(stored, QuantState.from_dict(state, device=torch.device("cpu")))
        assert torch.equal(weight, stored.float()), name


@pytest.mark.parametrize("quantizer", BOTH)
def test_the_forward_pass_is_that_of_the_copy_read_back(tmp_path: Path, quantizer: Quantizer) -> None:
    drafter = make_drafter(tmp_path)
    quantize_drafter(drafter, tmp_path / "copy", Choice(quantizer.format, group_size=quantizer.group_size))
    model, ids = load_model(drafter), torch.arange(3, 43).reshape(2, 20)
    with quantized(model, quantizer):
        trained = model(ids).logits
        # with gradients on: without, bitsandbytes takes a bfloat16 kernel on some CPUs
        assert torch.equal(load_model(tmp_path / "copy")(ids).logits, trained)
    assert not torch.equal(model(ids).logits, trained)


def test_w4a16_by_hand() -> None:
    """Two groups of four: the value of largest magnitude has code −8 whatever its sign; the others go to the nearest."""
    weight = torch.tensor([[-0.8, 0.75, 0.26, -0.04, 1.6, -1.6, 0.3, 0.0]])
    scales = scales_of(weight, 4)
    assert scales.dtype == torch.bfloat16
    torch.testing.assert_close(scales.float(), torch.tensor([[0.1, -0.2]]), rtol=2**-8, atol=0)
    # −1.6 lies 8 steps away on the side that has 7
    assert codes_of(weight, scales).tolist() == [[-8, 7, 3, 0, -8, 7, -1, 0]]
    expected = torch.tensor([[-0.8, 0.7, 0.3, 0, 1.6, -1.4, 0.2, 0]])
    torch.testing.assert_close(w4a16(weight, 4), expected, rtol=2**-7, atol=1e-7)
    assert torch.equal(w4a16(torch.zeros(3, 8), 4), torch.zeros(3, 8))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w4a16_of_a_copy_is_the_copy_and_closer_than_by_the_usual_scale(group_size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    copy, scales = w4a16(weight, group_size), scales_of(weight, group_size)
    assert copy.dtype == dtype
    assert torch.equal(codes_of(copy, scales), codes_of(weight, scales))
    assert torch.equal(w4a16(copy, group_size), copy)
    usual = weight.float().unflatten(1, (-1, group_size)).abs().amax(2) / 7.5
    rounded = codes_of(weight, usual).unflatten(1, (-1, group_size)) * usual[..., None]
    ours, theirs = ((c.float() - weight.float()).square().mean() for c in (copy, rounded.flatten(1)))
    assert ours < 0.95 * theirs


@pytest.mark.parametrize("quantizer", BOTH)
def test_the_gradient_at_the_copy_moves_the_weight_itself(quantizer: Quantizer) -> None:
    ids = torch.arange(3, 43).reshape(2, 20)
    model, plain = tiny.model(), tiny.model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in linear_weights(plain).values():
            p.copy_(quantizer(p))
    plain(ids, labels=ids).loss.backward()
    with quantized(model, quantizer):
        loss = model(ids, labels=ids).loss
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, before[name]), name  # put back
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    assert not torch.equal(model(ids, labels=ids).loss, loss)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name].sub(p.grad, alpha=0.1), msg=name)  # type: ignore[arg-type]


def test_weights_come_back_when_something_fails_inside() -> None:
    model = tiny.model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fails() -> None:
        with quantized(model, BOTH[1]):
            assert not torch.equal(
                model.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"]
            )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_layers_are_those_that_quantize_takes(tmp_path: Path, tied: bool) -> None:
    drafter = make_drafter(tmp_path, tied=tied)
    assert set(linear_weights(load_model(drafter))) == set(linear_layers(drafter, read_headers(drafter)))


def test_shards_are_refused() -> None:
    require_whole("replicated")
    with pytest.raises(InputError, match="fsdp2 shards them: train without it"):
        require_whole("fsdp2")
