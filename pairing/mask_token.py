"""The mask token of a drafter that writes all its drafts in one pass: which id is free for it, and where engines read it.

vLLM 0.32 (`_init_parallel_drafting_params`) takes the first of `CONFIG_KEYS` in the drafter's config.json. The id should stand
in no text: a drafter that meets it in a prompt reads it as a draft to be made. That costs acceptance, never correctness.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairing.compare_chat import resolved_ids
from pairing.compare_tokens import tokens_by_id
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.finding import Finding
from pairing.rows import mean_row, special_ids
from pairing.side import Side, read_side
from pairing.source import load_tokenizer, resolve
from pairing.weights import EMBEDDINGS, find, read_headers

CONFIG_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in vLLM's order
RESERVED = ("reserved", "unused", "mask", "extra_id")  # what spare tokens are called; these go before others


@dataclass(frozen=True)
class Mask:
    id: int
    token: str | None  # None: a row that no token uses


def mask_id_of(config: Mapping[str, Any]) -> int | None:
    """The mask id that vLLM reads in a config.json; None where it holds none."""
    return next((int(config[key]) for key in CONFIG_KEYS if config.get(key) is not None), None)


def mask_of(folder: Path) -> Mask | None:
    """The mask that a drafter's config names."""
    id_ = mask_id_of(read_json(folder / "config.json"))
    return None if id_ is None else Mask(id_, tokens_by_id(load_tokenizer(folder)).get(id_))


def free_mask(folder: Path, named: str | int | None = None, used: Collection[int] = (), padding: bool = True) -> Mask:
    """A mask for the drafter in `folder`: the `named` token or id, else a spare special token or, where `padding` allows it,
    a padding row; none of the ids in `used`, which texts hold.

    A padding row that is named is taken whatever `padding` says. A tied head takes a spare token first: a padding row is held
    at the mean of the real ones there, so that it is never drafted, and cannot learn. Elsewhere a padding row first, which no
    text can hold. Raises InputError where none is free.
    """
    side = read_side(resolve(str(folder)))
    tokens, rows = tokens_by_id(side.tokenizer), int(side.text["vocab_size"])
    taken = dict.fromkeys(used, "texts here hold it") | _taken(side, tokens)
    if named is not None:
        ids = {token: id_ for id_, token in tokens.items()}
        id_ = named if isinstance(named, int) else ids.get(named, -1)
        if not 0 <= id_ < rows:
            raise InputError(f"mask_token={named}: {folder} has no such token or row ({rows} rows)")
        if id_ in taken:
            raise InputError(f"mask_token={named}: not free, {taken[id_]}: name another one")
        return Mask(id_, tokens.get(id_))
    spare = [i for i in special_ids(side.tokenizer) if i < rows and i not in taken]
    spare.sort(key=lambda i: (not any(word in tokens[i].lower() for word in RESERVED), i))
    unused = list(range(max(tokens) + 1, rows)) if padding else []
    tied = bool(side.config.get("tie_word_embeddings", True))
    if free := [*spare, *unused] if tied else [*unused, *spare]:
        return Mask(free[0], tokens.get(free[0]))
    more = (
        ", and there is no padding row" if padding else "; `draftsmith init mask_token=auto` may prepare a padding row"
    )
    raise InputError(
        f"{folder}: no free mask id: every special token of its tokenizer has a role or stands in the texts{more}. Name a token "
        "that no text here holds: mask_token=…"
    )


def _taken(side: Side, tokens: Mapping[int, str]) -> dict[int, str]:
    """Ids that something else is said with, and what."""
    templates = side.tokenizer.chat_template or ""
    text = templates if isinstance(templates, str) else "".join(templates.values())
    in_template = [i for i in special_ids(side.tokenizer) if tokens[i] in text]
    roles = {i: f"it is the {role} token" for role, ids in resolved_ids(side).items() for i in ids}
    return dict.fromkeys(in_template, "the chat template writes it") | roles


def mask_findings(side: Side, tokens: Mapping[int, str]) -> list[Finding]:
    """Whether the drafter's mask id, where it names one, is a row of its own that nothing else is said with."""
    ids = {key: side.config[key] for key in CONFIG_KEYS if side.config.get(key) is not None}
    if not ids:
        return []
    (key, id_), rows, where = next(iter(ids.items())), side.text.get("vocab_size"), "mask token"
    fix = "make the drafter again with `draftsmith init mask_token=…` and distil it"
    if rows is not None and not 0 <= id_ < rows:
        what = f"the drafter's mask id is {id_} ({key}), its rows end at {rows - 1}"
        return [Finding("blocks", what, where, fix, stops=("vllm",))]
    findings = []
    if len(set(ids.values())) > 1:
        named = ", ".join(f"{k} {v}" for k, v in ids.items())
        what = f"the drafter's config names several mask ids ({named}); vLLM reads {key}"
        findings.append(Finding("warns", what, where, "leave the one that it was trained with"))
    if reason := _taken(side, tokens).get(id_):
        what = f"the drafter's mask id {id_} is not free: {reason}, and the drafter takes it for a draft to be made"
        findings.append(Finding("warns", what, where, fix))
    token = repr(tokens[id_]) if id_ in tokens else "a padding row"
    what = f"drafts all tokens in one pass with mask id {id_} ({token}): `parallel_drafting`"
    return [*findings, Finding("info", what, where, "")]


def write_mask(folder: Path, mask: Mask) -> None:
    """Names `mask` in the config.json of a drafter that was just made. A padding row's embedding becomes the mean of the
    real ones: as it is it may be all zeros, of which nothing can be made, and with a tied head that is what it must stay.
    """
    from safetensors.torch import load_file, save_file  # here: `check` does without torch

    info = find(read_headers(folder), EMBEDDINGS)
    if mask.token is None and info is not None:
        weights = load_file(info.file)
        (name,) = [n for n in weights if n.endswith(EMBEDDINGS)]
        real = tokens_by_id(load_tokenizer(folder))
        weights[name][mask.id] = mean_row(weights[name], real).to(weights[name].dtype)
        temp = info.file.with_suffix(".tmp")
        save_file({n: t.contiguous() for n, t in weights.items()}, temp, metadata={"format": "pt"})
        temp.replace(info.file)
    write_json(folder / "config.json", with_mask(read_json(folder / "config.json"), mask.id))


def with_mask(config: dict[str, Any], mask_id: int) -> dict[str, Any]:
    """`config` with this mask id where vLLM reads one."""
    key = next((key for key in CONFIG_KEYS if config.get(key) is not None), "pard_token")
    return config | {key: mask_id}
