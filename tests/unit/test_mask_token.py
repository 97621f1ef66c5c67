"""Which id is free to be a mask, where it is written, and what `check` says of one."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig

from pairing.alignment import check_pair
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import CONFIG_KEYS, Mask, free_mask, mask_id_of, with_mask, write_mask
from pairing.source import load_model, resolve
from tests import tiny

SPARE = tiny.REAL_TOKENS  # the first added token's id


def folder(path: Path, spare: tuple[str, ...] = (), **kwargs: Any) -> Path:
    """A tiny model whose tokenizer has these special tokens more."""
    tiny.folder(path, **kwargs)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in spare], special_tokens=True)
    tokenizer.save_pretrained(path)
    return path


def test_what_is_taken_first(tmp_path: Path) -> None:
    """Tied: a spare token, "reserved" before others; untied: a padding row. Roles and the template's tokens never."""
    tied = folder(tmp_path / "tied", ("<|tool|>", "<|reserved_7|>"))
    assert free_mask(tied) == Mask(SPARE + 1, "<|reserved_7|>")
    assert free_mask(tied, used={SPARE + 1}) == Mask(SPARE, "<|tool|>")
    assert free_mask(tied, used={SPARE, SPARE + 1}) == Mask(SPARE + 2, None)
    untied = folder(tmp_path / "untied", ("<|reserved_7|>",), tied=False)
    assert free_mask(untied) == Mask(SPARE + 1, None)
    assert free_mask(untied, padding=False) == Mask(SPARE, "<|reserved_7|>")
    assert free_mask(tiny.folder(tmp_path / "plain")) == Mask(tiny.REAL_TOKENS, None)


def test_a_named_one(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", ("<|tool|>",))
    assert free_mask(path, "<|tool|>") == Mask(SPARE, "<|tool|>")
    assert free_mask(path, SPARE + 4, padding=False) == Mask(SPARE + 4, None)

    def said(named: str | int, used: set[int] = set()) -> str:  # noqa: B006
        with pytest.raises(InputError) as e:
            free_mask(path, named, used)
        assert "\n" not in str(e.value)
        return str(e.value)

    assert "it is the eos token" in said("<|im_end|>")
    assert "texts here hold it" in said("<|tool|>", {SPARE})
    assert "has no such token or row" in said("<|mask|>")
    assert "has no such token or row" in said(tiny.ROWS)
    assert said("<|im_end|>").startswith("mask_token=<|im_end|>: ")
    for key, origin in (
        ("masks.token", ""),
        ("masks.token", " (its config's)"),
    ):  # as the verb calls it, and its source
        with pytest.raises(InputError, match=r"^masks\.token=2.*: name another one: masks\.token=…$") as e:
            free_mask(path, 2, key=key, origin=origin)
        assert str(e.value).startswith(f"masks.token=2{origin}: ")


def test_none_is_free(tmp_path: Path) -> None:
    full = tiny.folder(tmp_path / "full", rows=tiny.REAL_TOKENS)
    with pytest.raises(InputError, match=r"no free mask id: every special token .* no padding row\. Name a token"):
        free_mask(full)
    with pytest.raises(InputError, match=r"no text here holds: mask_token=…$"):
        free_mask(full)
    with pytest.raises(InputError, match=r"no text here holds: masks\.token=…$"):
        free_mask(full, key="masks.token")
    with pytest.raises(InputError, match=r"`draftsmith init mask_token=auto` may prepare a padding row"):
        free_mask(tiny.folder(tmp_path / "padded"), padding=False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_padding_row_is_prepared_and_is_never_drafted(tmp_path: Path, tied: bool) -> None:
    """Its embedding is the mean of the real ones; no other row moves; no real hidden state makes it the argmax."""
    target = tiny.folder(tmp_path / "target", layers=3, tied=tied)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])
    before = load_model(tmp_path / "draft")
    write_mask(tmp_path / "draft", Mask(SPARE + 1, None))
    assert mask_id_of(read_json(tmp_path / "draft" / "config.json")) == SPARE + 1
    after = load_model(tmp_path / "draft")
    old, new = (m.get_input_embeddings().weight for m in (before, after))
    torch.testing.assert_close(new[SPARE + 1], old[: tiny.REAL_TOKENS].mean(0))
    others = [i for i in range(tiny.ROWS) if i != SPARE + 1]
    assert torch.equal(new[others], old[others])
    if not tied:
        assert torch.equal(before.lm_head.weight, after.lm_head.weight)
    else:
        logits = after(torch.randint(3, 259, (16, 40), generator=torch.Generator().manual_seed(0))).logits
        assert not bool((logits.argmax(-1) == SPARE + 1).any())


def test_keys_are_read_in_the_engines_order() -> None:
    assert mask_id_of({}) is None
    assert mask_id_of({"pard_token": 5}) == 5
    assert mask_id_of({"pard_token": 5, "mask_token_id": None}) == 5
    assert mask_id_of({"pard_token": 5, "mask_token_id": 7}) == 7
    assert with_mask({"pard_token": 5, "mask_token_id": 7}, 3) == {"pard_token": 5, "mask_token_id": 3}
    assert with_mask({}, 3) == {"pard_token": 3}


@cache
def vllms_own() -> Callable[[Any], None]:
    """The function of the installed vLLM that reads the mask, out of its source: vLLM takes seconds to import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "v1" / "spec_decode" / "llm_base_proposer.py"
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    (function,) = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "_init_parallel_drafting_params"]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[function.name]


def in_vllm(config: dict[str, Any]) -> Any:
    """What the installed vLLM takes for the mask of this config.json; None where it takes nothing."""
    read = SimpleNamespace(hf_config=LlamaConfig.from_dict(config))
    proposer = SimpleNamespace(draft_model_config=read, pass_hidden_states_to_model=False)
    try:
        vllms_own()(proposer)
    except ValueError:
        return None
    return proposer.parallel_drafting_token_id


def test_the_mask_is_what_the_installed_vllm_reads() -> None:
    """For each key absent, null or an id, with and without dflash_config: read and written where vLLM reads."""
    kinds = ({}, None, 0), ({}, None, 1), ({}, None, 2), ({}, None, 3)
    nested: list[dict[str, Any]] = [{}, {"dflash_config": {}}, {"dflash_config": {"block_size": 4}}]
    nested += [{"dflash_config": {"mask_token_id": id_, "block_size": 4}} for id_ in (None, 4)]
    seen = set()
    for more, values in itertools.product(nested, itertools.product(*kinds)):
        config = more | {key: v for key, v in zip(CONFIG_KEYS[1:], values, strict=True) if v != {}}
        expected = in_vllm(config)
        assert mask_id_of(config) == mask_id_of(LlamaConfig.from_dict(config).to_dict()) == expected, config
        made = with_mask(config, 9)
        assert in_vllm(made) == mask_id_of(made) == 9, config
        assert made.get("dflash_config", {}).get("block_size") == config.get("dflash_config", {}).get("block_size")
        seen.add(expected)
    assert seen == {None, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("id_", ["<mask>", "5", 5.0, True, [5]])
def test_a_mask_that_is_no_id(id_: Any) -> None:
    with pytest.raises(
        InputError, match=r"^the drafter's config\.json: pard_token is .*, which is no token id: write"
    ) as e:
        mask_id_of({"pard_token": id_})
    assert "\n" not in str(e.value)
    with pytest.raises(InputError, match=r"^here: pard_token is"):
        mask_id_of({"pard_token": id_}, "here")


@pytest.mark.parametrize(
    ("keys", "level", "words"),
    [
        ({"pard_token": SPARE}, "info", "drafts all tokens in one pass with mask id 259 (a padding row)"),
        ({"pard_token": 2}, "warns", "mask id 2 is not free: it is the eos token"),
        ({"pard_token": 2}, "info", "drafts all tokens in one pass"),
        ({"pard_token": tiny.ROWS}, "blocks", "mask id is 272 (pard_token), its rows end at 271"),
        ({"pard_token": 260, "mask_token_id": 261}, "warns", "several mask ids (mask_token_id 261, pard_token 260)"),
        ({"pard_token": "<mask>"}, "blocks", "mask id is '<mask>' (pard_token), which is no token id"),
        (
            {"pard_token": 259, "ptd_token_id": ["<mask>"]},
            "warns",
            "several mask ids (pard_token 259, ptd_token_id ['<mask>'])",
        ),
        (
            {"pard_token": 260, "dflash_config": {"mask_token_id": 261}},
            "warns",
            "several mask ids (dflash_config.mask_token_id 261, pard_token 260)",
        ),
        (
            {"dspark_noise_token_id": None, "pard_token": 260},
            "warns",
            "mask id (pard_token 260) stands behind dspark_noise_token_id, which is null, and vLLM reads that: no mask",
        ),
        ({"pard_token": None}, None, "mask"),
        ({}, None, "mask"),
    ],
)
def test_check_says_what_the_mask_is(tmp_path: Path, keys: dict[str, Any], level: str | None, words: str) -> None:
    target = tiny.folder(tmp_path / "target")
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 1])
    write_json(tmp_path / "draft" / "config.json", read_json(tmp_path / "draft" / "config.json") | keys)
    report = check_pair(resolve(str(target)), resolve(str(tmp_path / "draft")))
    found = [f for f in report["findings"] if f["where"] == "mask token"]
    if level is None:
        assert not found
        return
    assert any(f["level"] == level and words in f["what"] for f in found), json.dumps(found)
    assert report["aligned"] == (level != "blocks")
