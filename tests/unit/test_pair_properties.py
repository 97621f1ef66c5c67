"""Random tokenizer pairs: what nearly fits is always mended to a pair that passes `check`; what is unrelated never passes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pairing.alignment import check_pair, tokens_by_id
from pairing.files import read_json, write_json
from pairing.repair import plan_repair, repair
from pairing.source import load_tokenizer, resolve
from tests import tiny
from tests.unit.test_alignment import edit

WIDTH = 8
NAME = "model.embed_tokens.weight"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
# merges and added tokens that a tokenizer may have or lack
WORDS = ["th", "he", "an", "in", "er", "Ġa", "Ġt"]
MARKS = ["<|im_start|>", "<|im_end|>", "<|tool|>", "<think>", "ab cd"]

few = settings(max_examples=25, deadline=None)


@st.composite
def tokenizers(draw: st.DrawFn) -> dict[str, Any]:
    """The vocabulary in its order, merges, and added tokens with ids above it, with holes."""
    words = draw(st.lists(st.sampled_from(WORDS), unique=True))
    order = draw(st.permutations([*BYTES, *words]))
    marks = draw(st.lists(st.sampled_from(MARKS), unique=True, min_size=2))
    gaps = draw(st.lists(st.integers(1, 5), min_size=len(marks), max_size=len(marks)))
    added, at = {}, len(order) - 1
    for mark, gap in zip(marks, gaps, strict=True):
        at += gap
        added[mark] = at
    return {"order": list(order), "words": words, "added": added, "eos": marks[0]}


def highest(spec: dict[str, Any]) -> int:
    return max(len(spec["order"]) - 1, *spec["added"].values())


def clash(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether some id has a token in both, and not the same one."""
    a, b = ({**dict(enumerate(s["order"])), **{i: mark for mark, i in s["added"].items()}} for s in (one, other))
    return any(a[i] != b[i] for i in a.keys() & b.keys())


def write(path: Path, spec: dict[str, Any], rows: int, tied: bool = True, template: bool = True, seed: int = 0) -> Path:
    raw = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(spec["order"])}, merges=[(w[0], w[1]) for w in spec["words"]])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw)
    fast.chat_template = tiny.CHATML if template else None
    fast.save_pretrained(path)

    def add(value: dict[str, Any]) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for mark, i in spec["added"].items():
            value["added_tokens"].append({"id": i, "content": mark, "special": mark.startswith("<|"), **flags})
            value["model"]["vocab"][mark] = i  # where ids have holes the tokenizer keeps them by this

    edit(path / "tokenizer.json", add)
    edit(path / "tokenizer_config.json", lambda v: v.update(eos_token=spec["eos"]))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": rows, "hidden_size": WIDTH,
              "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 512,
              "tie_word_embeddings": tied, "eos_token_id": spec["added"][spec["eos"]]}  # fmt: skip
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"eos_token_id": spec["added"][spec["eos"]]})
    torch.manual_seed(seed)
    weights = {NAME: torch.randn(rows, WIDTH)} | ({} if tied else {"lm_head.weight": torch.randn(rows, WIDTH)})
    save_file(weights, path / "model.safetensors")
    return path


@st.composite
def near(draw: st.DrawFn, target: dict[str, Any]) -> dict[str, Any]:
    """The target's tokenizer with some added tokens left out, others put on top, another eos, other merges of the same tokens."""
    merged = draw(st.permutations(target["words"]))
    spec = {**target, "added": dict(target["added"]), "words": merged[: draw(st.integers(0, len(merged)))]}
    for mark in draw(st.lists(st.sampled_from(list(spec["added"])), unique=True, max_size=len(spec["added"]) - 1)):
        spec["added"].pop(mark)
    if draw(st.booleans()):
        spec["added"]["<extra>"] = highest(target) + draw(st.integers(1, 3))
    spec["eos"] = draw(st.sampled_from(list(spec["added"])))
    return spec


@few
@given(st.data())
def test_what_nearly_fits_is_mended(data: st.DataObject) -> None:
    """D1, D3, D4, D5: every mixture of other rows, lacking, extra and high tokens, another eos and template."""
    target = data.draw(tokenizers())
    drafter = data.draw(near(target))
    rows = highest(target) + 1 + data.draw(st.integers(0, 20))
    own = max(len(drafter["order"]), highest(drafter) + 1 + data.draw(st.integers(-3, 20)))
    tied, template, quiet = (data.draw(st.booleans()) for _ in range(3))
    with tempfile.TemporaryDirectory() as temp:
        a = resolve(str(write(Path(temp) / "a", target, rows)))
        b = resolve(str(write(Path(temp) / "b", drafter, own, tied, template, seed=1)))
        before = check_pair(a, b)
        assert not [f for f in before["findings"] if f["level"] == "blocks"]
        result = repair(a, b, Path(temp) / "c", quiet)
        assert result["needed"] or before["verdict"] == "aligned"
        if not result["needed"]:
            return
        c = resolve(str(Path(temp) / "c"))
        after = check_pair(a, c)
        assert after["aligned"]
        warned = [f["what"] for f in after["findings"] if f["level"] == "warns"]
        untrained = [what for what in warned if "never trained" in what]
        itself = [f for f in check_pair(a, a)["findings"] if f["level"] == "warns"]
        assert len(warned) - len(untrained) == len(itself)
        assert not plan_repair(a, c, quiet)["needed"]
        ours, theirs = tokens_by_id(load_tokenizer(a.path)), tokens_by_id(load_tokenizer(b.path))
        kept = sorted(i for i in ours if i in theirs and i < own)
        old, new = load_file(b.path / "model.safetensors"), load_file(c.path / "model.safetensors")
        assert old.keys() == new.keys()
        for name in old:
            assert new[name].shape == (rows, WIDTH)
            assert torch.equal(new[name][kept], old[name][kept])
        lacking = sorted(set(ours) - set(kept))
        assert read_json(c.path / "pair.json")["needs_training"] == lacking
        assert len(untrained) == bool(lacking)
        padding = [i for i in range(rows) if i not in ours and (quiet or i >= own)]
        head = new["lm_head.weight"] if not tied else new[NAME]
        hidden = torch.randn(200, WIDTH)
        logits = hidden @ head.T
        if padding:
            assert (logits[:, padding].max(1).values < logits[:, sorted(ours)].max(1).values).all()


@few
@given(st.data())
def test_what_is_unrelated_never_passes(data: st.DataObject) -> None:
    """D2: equal sizes or not, some id has another string: blocked, not mended, whatever else differs."""
    target = data.draw(tokenizers())
    drafter = data.draw(near(target))
    order = drafter["order"] = list(drafter["order"])
    if data.draw(st.booleans()):
        i, j = data.draw(st.lists(st.integers(0, len(order) - 1), min_size=2, max_size=2, unique=True))
        order[i], order[j] = order[j], order[i]
    else:
        # not one that has the same tokens at the same ids and lacks some or has more: that one nearly fits
        drafter = data.draw(tokenizers().filter(lambda spec: clash(spec, target)))
    size = max(highest(target), highest(drafter)) + 1
    with tempfile.TemporaryDirectory() as temp:
        a = resolve(str(write(Path(temp) / "a", target, size)))
        b = resolve(str(write(Path(temp) / "b", drafter, size)))
        report = check_pair(a, b)
        assert not report["aligned"]
        assert report["findings"][0]["level"] == "blocks"
        assert report["repair"] is None
        result = repair(a, b, Path(temp) / "c")
        assert result["blocks"]
        assert not (Path(temp) / "c").exists()


def test_the_written_tokenizers_have_the_ids_that_were_drawn(tmp_path: Path) -> None:
    spec = {"order": [*BYTES, "th"], "words": ["th"], "added": {"<|im_start|>": 258, "<think>": 262}, "eos": "<think>"}
    tokens = tokens_by_id(load_tokenizer(write(tmp_path / "a", spec, 300)))
    assert tokens[258] == "<|im_start|>"
    assert tokens[262] == "<think>"
    assert 260 not in tokens
    assert load_tokenizer(tmp_path / "a")("th<think>")["input_ids"] == [256, 262]
