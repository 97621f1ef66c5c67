"""The 4-bit copy: what is on disk is what was in memory, its sizes and its drift are true, and refusals come first."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from distill import quantize as module
from distill.answers import Answer, begin, complete, write_shard
from distill.drift import random_texts
from distill.prompts import prompt
from distill.quantize import Choice, plan_quantize, quantize_drafter
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json
from pairing.init import init_drafter
from pairing.pair import read_pair, update_pair
from pairing.source import digests, load_model, resolve
from recipes import quantize as recipe
from tests import tiny


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return make_drafter(tmp_path)


def make_drafter(tmp_path: Path, dtype: str | None = None, **kwargs: Any) -> Path:
    target = tiny.folder(tmp_path / "target", layers=3, **kwargs)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 2], dtype)
    return tmp_path / "drafter"


def logits(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder, dtype)(torch.tensor([ids])).logits[0]


def test_the_file_holds_nf4_of_the_drafters_weights(drafter: Path, tmp_path: Path) -> None:
    """Each linear layer, unpacked by bitsandbytes from what the file says, is the drafter's layer rounded to NF4."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

    quantize_drafter(drafter, tmp_path / "nf4")
    old, new = load_file(drafter / "model.safetensors"), load_file(tmp_path / "nf4" / "model.safetensors")
    linear = [n for n in old if n.endswith("_proj.weight")]
    assert len(linear) == 14
    for name in linear:
        state = {k.removeprefix(f"{name}."): v for k, v in new.items() if k.startswith(f"{name}.")}
        unpacked = dequantize_4bit(new[name], QuantState.from_dict(state, device=torch.device("cpu")))
        expected = dequantize_4bit(*quantize_4bit(old[name], quant_type="nf4", compress_statistics=True))
        assert torch.equal(unpacked, expected), name
        assert 0.02 < float((unpacked - old[name]).norm() / old[name].norm()) < 0.15  # rounded, and still itself
    for name in set(old) - set(linear):
        assert torch.equal(new[name], old[name]), name  # embedding and norms as they were


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_head_and_embedding_are_left(tmp_path: Path, tied: bool, dtype: str | None) -> None:
    """D19: a head that is quantized loads nowhere; with a tied head nothing may untie it."""
    drafter = make_drafter(tmp_path, dtype, tied=tied)
    result = quantize_drafter(drafter, tmp_path / "nf4")
    kept = getattr(torch, dtype or "float32")
    weights = load_file(tmp_path / "nf4" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == kept
    assert weights["lm_head.weight"].dtype == kept if not tied else "lm_head.weight" not in weights
    assert read_json(tmp_path / "nf4" / "config.json")["tie_word_embeddings"] is tied
    assert (result["compute_dtype"], result["kept_dtype"]) == (dtype or "float32", dtype or "float32")
    assert logits(tmp_path / "nf4", [5, 6, 7], kept).isfinite().all()


def test_sizes_are_those_on_disk(drafter: Path, tmp_path: Path) -> None:
    result = quantize_drafter(drafter, tmp_path / "nf4")
    old, new = load_file(drafter / "model.safetensors"), load_file(tmp_path / "nf4" / "model.safetensors")
    assert result["bytes_before"] == sum(t.nbytes for t in old.values())
    assert result["bytes_after"] == sum(t.nbytes for t in new.values())
    assert result["linear_bytes_before"] == sum(t.nbytes for n, t in old.items() if "_proj.weight" in n)
    assert result["linear_bytes_after"] == sum(t.nbytes for n, t in new.items() if "_proj.weight" in n)
    estimate = plan_quantize(drafter)["bytes_after"]
    assert abs(estimate - result["bytes_after"]) < 0.05 * result["bytes_after"]


def test_drift_on_random_ids_is_what_two_loads_show(drafter: Path, tmp_path: Path) -> None:
    result = quantize_drafter(drafter, tmp_path / "nf4")
    texts, _ = random_texts(drafter)
    assert max(max(t.ids) for t in texts) < tiny.REAL_TOKENS  # padding rows are no tokens
    a = torch.cat([logits(drafter, t.ids)[:-1] for t in texts])
    b = torch.cat([logits(tmp_path / "nf4", t.ids)[:-1] for t in texts])
    drift = result["logit_drift"]
    assert result["reload_max_difference"] == 0
    assert drift["positions"] == len(a)
    assert drift["max_abs"] == pytest.approx(float((a - b).abs().max()), rel=1e-4)
    assert drift["mean_abs"] == pytest.approx(float((a - b).abs().mean()), rel=1e-4)
    assert drift["top1_agreement"] == float((a.argmax(-1) == b.argmax(-1)).double().mean())
    assert 0.05 < drift["top1_agreement"] < 1
    assert "top1_before" not in drift


def test_drift_on_recorded_answers(drafter: Path, tmp_path: Path) -> None:
    """D17: agreement with the target's own tokens, before and after. Here they are the drafter's, so before is 1."""
    begin(tmp_path / "answers", {"target": {"name": "t"}})
    rows = []
    for i in range(3):
        ids, answer = [1, 30 + i, 40], []
        for _ in range(6):
            answer.append(int(logits(drafter, [*ids, *answer])[-1].argmax()))
        head, chat = np.zeros((6, 1)), prompt([{"role": "user", "content": str(i)}])
        rows.append(Answer(chat, [*ids, *answer], [(3, 9)], "length", head.astype(np.int32), head))
    write_shard(tmp_path / "answers", rows)
    complete(tmp_path / "answers", {})
    drift = quantize_drafter(drafter, tmp_path / "nf4", answers=tmp_path / "answers", rows=2)["logit_drift"]
    assert drift["positions"] == 12
    assert drift["top1_before"] == 1
    assert drift["top1_after"] == drift["top1_agreement"]
    assert drift["on"].startswith("2 answers of")


def test_pair_card_and_companions_come_along(drafter: Path, tmp_path: Path) -> None:
    update_pair(drafter, training={"steps": 3}, measurements=[{"acceptance_length": 2.0}])
    result = quantize_drafter(drafter, tmp_path / "nf4")
    old, new = read_pair(drafter), read_pair(tmp_path / "nf4")
    assert new["training"] == {"steps": 3}
    assert new["measurements"] == []  # they were measured with the other weights
    assert new["target"] == old["target"]
    assert [m["step"] for m in new["made"]] == ["init", "quantize"]
    assert new["quantization"] == result
    a, b = digests(drafter), digests(tmp_path / "nf4")
    assert (a["tokenizer"], a["template"]) == (b["tokenizer"], b["template"])
    assert "logit_drift.top1_agreement" in (tmp_path / "nf4" / "README.md").read_text()


@pytest.mark.parametrize(("width", "taken"), [(576, True), (896, True), (1024, True), (608, False), (96, False)])
def test_widths(tmp_path: Path, width: int, taken: bool) -> None:
    """D19: blocks of 64 values must not cross rows; the error names the 16-bit way out, and nothing is written."""
    drafter = make_drafter(tmp_path)
    config = LlamaConfig(vocab_size=tiny.ROWS, hidden_size=width, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=width // 32, head_dim=32, tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(drafter)
    if taken:
        assert plan_quantize(drafter)["linear_layers"] == 7
    else:
        with pytest.raises(InputError, match=rf"{width} wide, no multiple of 64.*--dtype bfloat16"):
            quantize_drafter(drafter, tmp_path / "nf4")
        assert not (tmp_path / "nf4").exists()


def test_refusals_before_any_work(drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D19: quantized already, no drafter, no answers, no room, no bitsandbytes."""
    quantize_drafter(drafter, tmp_path / "nf4")
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match=r"quantized already \(bitsandbytes\)"):
        quantize_drafter(tmp_path / "nf4", tmp_path / "again")
    with pytest.raises(InputError, match=r"no pair\.json"):
        quantize_drafter(tmp_path / "target", tmp_path / "again")
    with pytest.raises(InputError, match="no answers there"):
        quantize_drafter(drafter, tmp_path / "again", answers=tmp_path / "nowhere")
    with pytest.raises(InputError, match="not empty"):
        quantize_drafter(drafter, tmp_path / "nf4")
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
        with pytest.raises(InputError, match=r"MiB are needed and 0 MiB are free"):
            quantize_drafter(drafter, tmp_path / "again")
    with monkeypatch.context() as m:
        m.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
        with pytest.raises(InputError, match=r"takes about 1 MiB of memory and 0 MiB are free"):
            quantize_drafter(drafter, tmp_path / "again")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "bitsandbytes" else find(n))
    with pytest.raises(
        InputError, match=r"pip install 'draftsmith\[quant\]'`, or serve the drafter as it is, in 16 bit"
    ):
        quantize_drafter(drafter, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_corrupt_shard(drafter: Path, tmp_path: Path) -> None:
    """Cut short, or whole by its header with rubbish in it: one line that names it, and no folder."""
    file = drafter / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    for choice in (Choice("nf4"), Choice("w4a16")):
        with pytest.raises(InputError, match=r"layers.1.mlp.up_proj.weight holds values that are no numbers"):
            quantize_drafter(drafter, tmp_path / "out", choice)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="no whole safetensors file"):
        quantize_drafter(drafter, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]


def test_matrices_that_are_no_linear_layers(drafter: Path, tmp_path: Path) -> None:
    """GPT-2 stores its layers transposed (Conv1D): quantized they would be read wrong, left out nothing would be gained."""
    config = GPT2Config(vocab_size=tiny.ROWS, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(drafter)
    with pytest.raises(InputError, match=r"attn.c_attn.weight is no linear layer's.*--dtype bfloat16"):
        plan_quantize(drafter)


def test_a_reload_that_differs_is_a_failure_and_leaves_nothing(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: Path, **kwargs: Any) -> Any:
        model = load_model(folder, **kwargs)
        if folder.name.startswith(".nf4"):  # the copy, read back
            model.model.norm.weight.data[3] += 0.01
        return model

    monkeypatch.setattr(module, "load_model", load)
    with pytest.raises(PartFailedError, match="differs from the one in memory"):
        quantize_drafter(drafter, tmp_path / "nf4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]


def test_recipe(drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(drafter), str(tmp_path / "nf4")]
    assert recipe.main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["linear_layers"] == 14
    assert not (tmp_path / "nf4").exists()
    assert recipe.main([*words, "compute_dtype=bfloat16", f"report={tmp_path / 'quantize.json'}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert read_json(tmp_path / "quantize.json") == result == read_pair(tmp_path / "nf4")["quantization"]
    assert read_json(tmp_path / "nf4" / "config.json")["quantization_config"]["bnb_4bit_compute_dtype"] == "bfloat16"
    with pytest.raises(InputError, match="compute_dtype"):
        recipe.main([*words, "compute_dtype=int8"])
