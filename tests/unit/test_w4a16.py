"""W4A16 copies: what is on disk is the drafter's weights rounded in groups, for every architecture that init makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from distill import w4a16
from distill.drift import Text, compare
from distill.quantize import Choice, linear_layers, plan_quantize, quantize_drafter
from distill.w4a16 import codes_of, names_of, scales_of, values_of
from pairing.errors import InputError
from pairing.files import read_json
from pairing.pair import read_pair
from pairing.source import load_model
from pairing.weights import read_headers
from recipes import quantize as recipe
from tests import architectures, tiny
from tests.stored_answers import answered, store
from tests.unit.test_quantize import make_drafter

W4A16 = Choice("w4a16")


def test_codes_by_hand() -> None:
    """Two groups of four; scale = largest magnitude / −8, which is stored exactly."""
    row_OI = torch.tensor([[8.0, -4.0, 1.4, 0.0, -0.8, 0.3, 0.05, 0.74]])
    scales_OG = scales_of(row_OI, 4)
    assert scales_OG.tolist() == [[-1.0, pytest.approx(0.1, rel=1e-2)]]
    assert codes_of(row_OI, scales_OG).tolist() == [[-8, 4, -1, 0, -8, 3, 0, 7]]
    assert values_of(codes_of(row_OI, scales_OG), scales_OG, torch.float32)[0, :4].tolist() == [8, -4, 1, 0]
    nothing_OI = torch.zeros(1, 4)
    assert codes_of(nothing_OI, scales_of(nothing_OI, 4)).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(("dtype", "tied"), [(None, True), ("bfloat16", False)])
def test_the_file_holds_the_weights_rounded(tmp_path: Path, dtype: str | None, tied: bool) -> None:
    """Unpacked by compressed-tensors each layer is within half a step of the drafter's; all else is as it was."""
    drafter = make_drafter(tmp_path, dtype, tied=tied)
    result = quantize_drafter(drafter, tmp_path / "w4a16", W4A16)
    old, new = load_file(drafter / "model.safetensors"), load_file(tmp_path / "w4a16" / "model.safetensors")
    linear = [name for name in old if name.endswith("_proj.weight")]
    assert len(linear) == result["linear_layers"] == 14
    for name in linear:
        packed, scale, shape = (new[part] for part in names_of(name))
        assert tuple(shape) == old[name].shape
        assert scale.dtype == old[name].dtype
        assert torch.equal(scale, scale.bfloat16().to(scale.dtype))  # the same in every engine
        unpacked = (
            unpack_from_int32(packed, 4, old[name].shape).float().unflatten(1, (-1, 64)) * scale.float()[..., None]
        )
        steps = (unpacked.flatten(1) - old[name].float()).abs().unflatten(1, (-1, 64)) / scale.float().abs()[..., None]
        assert float(steps.max()) <= 1.05  # the shorter side of the range ends at 7
        assert float((steps <= 0.51).float().mean()) > 0.97
    for name in set(old) - set(linear):
        assert torch.equal(new[name], old[name]), name
    assert ("lm_head.weight" in new) is not tied
    assert read_json(tmp_path / "w4a16" / "config.json")["tie_word_embeddings"] is tied


def test_sizes_record_and_card(tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path)
    plan = plan_quantize(drafter, W4A16)
    result = quantize_drafter(drafter, tmp_path / "w4a16", W4A16)
    assert (plan["bytes_after"], plan["linear_bytes_after"]) == (result["bytes_after"], result["linear_bytes_after"])
    assert result["linear_bytes_after"] < 0.15 * result["linear_bytes_before"]
    assert result["reload_max_difference"] == 0
    assert 0 < result["logit_drift"]["kl"] < 1
    assert read_pair(tmp_path / "w4a16")["quantization"] == result
    assert "| group_size | 64 |" in (tmp_path / "w4a16" / "README.md").read_text()


def test_calibrated_on_recorded_answers(tmp_path: Path) -> None:
    """On text like that which it was calibrated on, the copy is nearer to the drafter than round to nearest is."""
    drafter = make_drafter(tmp_path)
    target = tmp_path / "target"
    store(tmp_path / "train", answered(target, 24, seed=1), target)
    store(tmp_path / "test", answered(target, 8, seed=2), target)
    drifts = {}
    for name, calibration in (("nearest", None), ("calibrated", tmp_path / "train")):
        result = quantize_drafter(drafter, tmp_path / name, W4A16, tmp_path / "test", 8, calibration)
        drifts[name] = result["logit_drift"]
        assert result["calibrated_on"] == (f"24 answers of {calibration}" if calibration else None)
    assert drifts["calibrated"]["kl"] < 0.8 * drifts["nearest"]["kl"]


@pytest.mark.parametrize("kind", architectures.CLASSES)
def test_every_architecture_is_read_again(tmp_path: Path, kind: str) -> None:
    """Calibrated block by block, written, and read by transformers: the values in memory, bit by bit."""
    architectures.model(kind).save_pretrained(tmp_path / "model")
    headers = read_headers(tmp_path / "model")
    linear = linear_layers(tmp_path / "model", headers)
    assert all("embed" not in name and "lm_head" not in name for name in linear)
    texts = [Text(list(range(3 + i, 60)), 1) for i in range(3)]
    (tmp_path / "copy").mkdir()
    memory = w4a16.write(tmp_path / "model", tmp_path / "copy", linear, torch.float32, 32, texts)
    assert compare(memory, load_model(tmp_path / "copy"), texts)["max_abs"] == 0
    assert compare(load_model(tmp_path / "model"), memory, texts)["max_abs"] > 0


def test_several_shards(tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path)
    load_model(drafter).save_pretrained(drafter, max_shard_size="50KB")
    (drafter / "model.safetensors").unlink()
    assert len(list(drafter.glob("*.safetensors"))) > 2
    assert quantize_drafter(drafter, tmp_path / "w4a16", W4A16)["reload_max_difference"] == 0


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D19: each before the work, with a way out; the folder is absent then."""
    drafter = make_drafter(tmp_path)
    with pytest.raises(InputError, match=r"64 wide, no multiple of its group size 128.*--dtype bfloat16"):
        quantize_drafter(drafter, tmp_path / "out", Choice("w4a16", group_size=128))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="a LoRA adapter: quantize the drafter that it was merged into"):
        recipe.main([str(adapter), str(tmp_path / "out"), "format=w4a16"])
    for words, key in (
        (["compute_dtype=bfloat16", "format=w4a16"], "compute_dtype"),
        (["group_size=64"], "group_size"),
    ):
        with pytest.raises(InputError, match=f"{key} is of format="):
            recipe.main([str(drafter), str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_widths_of_another_back_end(tmp_path: Path) -> None:
    """48 outputs are too odd for the CPU back end's kernel, and none of Marlin's business."""
    drafter = make_drafter(tmp_path)
    config = tiny.model(layers=1).config
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 1, 16
    type(tiny.model())(config).save_pretrained(drafter)
    with pytest.raises(InputError, match=r"k_proj.weight has 16 outputs.*serve_on=cuda"):
        plan_quantize(drafter, W4A16)
    assert plan_quantize(drafter, Choice("w4a16", serve_on="cuda"))["linear_layers"] == 7
