"""Which id is free to be a mask, where it is written, and what `check` says of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from pairing.alignment import check_pair
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import Mask, free_mask, mask_id_of, with_mask, write_mask
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


def test_none_is_free(tmp_path: Path) -> None:
    full = tiny.folder(tmp_path / "full", rows=tiny.REAL_TOKENS)
    with pytest.raises(InputError, match=r"no free mask id: every special token .* no padding row\. Name a token"):
        free_mask(full)
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


@pytest.mark.parametrize(
    ("keys", "level", "words"),
    [
        ({"pard_token": SPARE}, "info", "drafts all tokens in one pass with mask id 259 (a padding row)"),
        ({"pard_token": 2}, "warns", "mask id 2 is not free: it is the eos token"),
        ({"pard_token": 2}, "info", "drafts all tokens in one pass"),
        ({"pard_token": tiny.ROWS}, "blocks", "mask id is 272 (pard_token), its rows end at 271"),
        ({"pard_token": 260, "mask_token_id": 261}, "warns", "several mask ids (mask_token_id 261, pard_token 260)"),
        ({}, None, "mask"),
    ],
)
def test_check_says_what_the_mask_is(tmp_path: Path, keys: dict[str, int], level: str | None, words: str) -> None:
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
