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
from recipes import check, init, repair
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
    ("file", "keys", "words"),
    [
        ("config.json", {"vocab_size": "272"}, "vocab_size is '272', not a whole number from 1 on"),
        ("config.json", {"vocab_size": -5}, "vocab_size is -5, not a whole number"),
        ("config.json", {"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ("config.json", {"max_position_embeddings": "512"}, "max_position_embeddings is '512'"),
        ("config.json", {"num_attention_heads": True}, "num_attention_heads is True"),
        ("config.json", {"rope_parameters": [1]}, r"rope_parameters is \[1\], not a group of keys"),
        ("config.json", {"rope_scaling": {"factor": "4"}}, r"rope_scaling\.factor is '4', not a number"),
        ("config.json", {"quantization_config": "nf4"}, "quantization_config is 'nf4'"),
        ("config.json", {"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
        ("config.json", {"model_type": 7}, "model_type is 7, not a name"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id is 'x', not an id or a list of ids"),
        ("config.json", {"text_config": {"hidden_size": "64"}}, r"text_config\.hidden_size is '64'"),
        (
            "generation_config.json",
            {"eos_token_id": [2, "two"]},
            r"generation_config\.json: eos_token_id is \[2, 'two'\]",
        ),
    ],
)
def test_values_that_are_none(tmp_path: Path, good: str, file: str, keys: dict[str, Any], words: str) -> None:
    """Written by hand and wrong: said at the door, on either side and by `init` too, before anything is read."""
    bad = tiny.folder(tmp_path / "bad")
    edit(bad / file, lambda v: v.update(keys))
    out = tmp_path / "out"
    refused(good, str(bad), f"bad: .*{words}", out)
    refused(str(bad), good, words, out)
    with pytest.raises(InputError, match=words):
        init.main([f"target={bad}", f"out={out}", "layers=[0]"])
    assert not out.exists()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "match"), [("[1]", "it holds no keys"), ("{nope", "not valid JSON")])
def test_configs_that_are_none(tmp_path: Path, good: str, file: str, text: str, match: str) -> None:
    bad = tiny.folder(tmp_path / "bad")
    (bad / file).write_text(text)
    refused(good, str(bad), match, tmp_path / "out")


def test_overrides_that_are_none(good: str) -> None:
    for words in ("{rope_parameters: 3}", "{max_position_embeddings: lots}"):
        with pytest.raises(
            InputError, match=r"with hf_overrides: (rope_parameters is 3|max_position_embeddings is 'lots')"
        ):
            check.main([good, good, f"hf_overrides={words}"])


def test_a_field_that_only_transformers_knows(tmp_path: Path) -> None:
    bad = tiny.folder(tmp_path / "bad")
    edit(bad / "config.json", lambda v: v.update(rms_norm_eps="small"))
    with pytest.raises(InputError, match=r"bad: config\.json is not one that transformers takes .*rms_norm_eps") as e:
        init.main([f"target={bad}", f"out={tmp_path / 'out'}", "layers=[0]"])
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written(tmp_path: Path, good: str) -> None:
    """A file in the way, a folder where a file is meant, a file system that takes none; nothing half-written."""
    near = str(tiny.folder(tmp_path / "near", rows=288))
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.iterdir())
    for out in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/nothing")):
        for main, words in ((repair.main, [near, good]), (init.main, [f"target={good}", "layers=[0]"])):
            with pytest.raises(InputError, match=r"cannot be written|exists already") as e:
                main([*words, f"out={out}"])
            assert "\n" not in str(e.value)
    for out, match in (
        (tmp_path, "a folder, and a file is to be written"),
        (Path("/proc/x.json"), "cannot be written"),
    ):
        with pytest.raises(InputError, match=match):
            check.main([good, good, f"out={out}"])
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_folder_within_a_model(tmp_path: Path, good: str) -> None:
    """Its files would become the model's own: templates are found in all of its folders."""
    near = str(tiny.folder(tmp_path / "near", rows=288))
    before = [sorted(Path(folder).iterdir()) for folder in (good, near)]
    for folder in (good, near):
        with pytest.raises(InputError, match=r"lies in .* the folder of a model: name another output folder"):
            repair.main([near, good, f"out={folder}/sub"])
    with pytest.raises(InputError, match="lies in"):
        init.main([f"target={good}", f"out={good}/sub", "layers=[0]"])
    with pytest.raises(InputError, match="lies in"):
        init.main([f"target={good}", f"out={near}/sub", f"donor={near}"])
    with pytest.raises(InputError, match="exists already and is not empty"):
        repair.main([near, good, f"out={good}"])
    assert [sorted(Path(folder).iterdir()) for folder in (good, near)] == before


def test_names_in_any_script(tmp_path: Path, good: str, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tiny.folder(tmp_path / "模型 Ünï|x")
    out = tmp_path / "ö 文"
    assert check.main([str(odd), good, "--markdown", "preflight=skip"]) == 0
    assert repair.main([str(tiny.folder(tmp_path / "near", rows=288)), str(odd), f"out={out}"]) == 0
    assert check.main([str(tmp_path / "near"), str(out), "preflight=skip"]) == 0
    assert "模型" in capsys.readouterr().out


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"x": {"dtype": "F32", "shape": "a", "data_offsets": [0, 4]}}',
        b'{"w": 1}',
        b'{"w": {"dtype": "F32", "shape": [1]}}',
        b'{"w": {"data_offsets": [0, 4]}}',
        b"{",
    ],
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
