"""Models that `check` and `repair` cannot use: one clear line each, exit 2, nothing written."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from pairing.alignment import check_pair
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.source import TOKENIZER_FILES, resolve
from pairing.weights import read_header, weight_files
from recipes import check, repair
from tests import tiny
from tests.unit.test_alignment import edit


def refused(target: str, drafter: str, match: str, out: Path) -> None:
    for recipe, words in ((check, [f"out={out}"]), (repair, [f"out={out}"])):
        with pytest.raises(InputError, match=match) as e:
            recipe.main([target, drafter, *words])
        assert "\n" not in str(e.value)
        assert not out.exists()


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(tiny.folder(tmp_path / "good"))


def test_a_folder_without_a_tokenizer(tmp_path: Path, good: str) -> None:
    bad = tiny.folder(tmp_path / "bad")
    for name in TOKENIZER_FILES:
        (bad / name).unlink(missing_ok=True)
    refused(good, str(bad), "bad: no tokenizer in that folder: copy tokenizer.json", tmp_path / "out")
    refused(str(bad), good, "no tokenizer in that folder", tmp_path / "out")


@pytest.mark.parametrize("text", ["{", '{"model": 3}', ""])
def test_a_corrupt_tokenizer(tmp_path: Path, good: str, text: str) -> None:
    bad = tiny.folder(tmp_path / "bad")
    (bad / "tokenizer.json").write_text(text)
    refused(good, str(bad), "bad: its tokenizer does not load", tmp_path / "out")


def test_a_slow_tokenizer(tmp_path: Path, good: str) -> None:
    """CTRL has a Python tokenizer and no other."""
    bad = tiny.folder(tmp_path / "bad")
    for name in TOKENIZER_FILES:
        (bad / name).unlink(missing_ok=True)
    write_json(bad / "vocab.json", {"<unk>": 0, "a</w>": 1, "b</w>": 2})
    (bad / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    write_json(bad / "tokenizer_config.json", {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"})
    refused(good, str(bad), r"only a slow \(Python\) tokenizer", tmp_path / "out")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "vit"},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    ],
)
def test_a_model_that_is_no_causal_lm(tmp_path: Path, good: str, config: dict[str, Any]) -> None:
    bad = tiny.folder(tmp_path / "bad")
    edit(bad / "config.json", lambda v: v.pop("architectures"))
    write_json(bad / "config.json", read_json(bad / "config.json") | config)
    refused(good, str(bad), "is no causal LM", tmp_path / "out")


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        {"architectures": ["SomethingNewForCausalLM"]},
        {"model_type": "llama"},
        {"model_type": "llava"},
        {"model_type": "nobody_knows"},
    ],
)
def test_models_that_continue_text(tmp_path: Path, good: str, config: dict[str, Any]) -> None:
    """They get past the door: `check` goes on to compare them, whatever it then says of a class with no such weights."""
    odd = tiny.folder(tmp_path / "odd")
    edit(odd / "config.json", lambda v: v.pop("architectures"))
    write_json(odd / "config.json", read_json(odd / "config.json") | config)
    report = check_pair(resolve(good), resolve(str(odd)))
    assert report["facts"]["drafter_rows"] == tiny.ROWS
    assert "tokens equal id by id" in str(report["findings"])


def test_a_gated_model_without_a_token(tmp_path: Path, good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub.errors import GatedRepoError

    def download(*_: Any, **__: Any) -> str:
        request = httpx.Request("GET", "https://hub.invalid")
        raise GatedRepoError("no", response=httpx.Response(401, request=request))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused(
        good, "owner/gated", "owner/gated: a gated model: accept its terms on the hub, then log in", tmp_path / "out"
    )


@pytest.mark.parametrize(
    "header", [b"[]", b'{"w": 1}', b'{"w": {"dtype": "F32", "shape": [1]}}', b'{"w": {"data_offsets": [0, 4]}}', b"{"]
)
def test_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    with pytest.raises(InputError, match="no whole safetensors file: fetch or save it again"):
        read_header(file)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": ["a"]}, {"weight_map": {"w": "../a/model.safetensors"}}])
def test_an_index_that_leads_nowhere_or_out_of_the_folder(tmp_path: Path, index: Any) -> None:
    """Copies of a model are written under the names in its index."""
    tiny.folder(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_json(tmp_path / "b" / "model.safetensors.index.json", index)
    with pytest.raises(InputError, match="no map of tensors to files of that folder"):
        weight_files(tmp_path / "b")
