"""The mask token of a drafter that writes all its drafts in one pass: which id is free for it, and where engines read it.

vLLM 0.32 (`_init_parallel_drafting_params`) takes the first of `CONFIG_KEYS` in the drafter's config.json, by `named_masks`. The
id should stand in no text: a drafter that meets it in a prompt reads it as a draft to be made. That costs acceptance, never
correctness.
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

# in vLLM's order
CONFIG_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
RESERVED = ("reserved", "unused", "mask", "extra_id")  # what spare tokens are called; these go before others


@dataclass(frozen=True)
class Mask:
    id: int
    token: str | None  # None: a row that no token uses


def named_masks(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json has at each of `CONFIG_KEYS` where vLLM looks at it; vLLM takes the first, whatever it is.

    It passes over a null `mask_token_id`. The others count where they are there at all, so a null hides what comes behind it.
    """
    nested, found = config.get("dflash_config"), {}
    if isinstance(nested, Mapping) and "mask_token_id" in nested:
        found["dflash_config.mask_token_id"] = nested["mask_token_id"]
    if config.get("mask_token_id") is not None:
        found["mask_token_id"] = config["mask_token_id"]
    return found | {key: config[key] for key in CONFIG_KEYS[2:] if key in config}


def mask_id_of(config: Mapping[str, Any], where: str = "the drafter's config.json") -> int | None:
    """The mask id that vLLM reads in a config.json; None where it finds none. Raises InputError where it finds no id."""
    key, id_ = next(iter(named_masks(config).items()), ("", None))
    if id_ is None or _is_id(id_):
        return None if id_ is None else int(id_)
    raise InputError(
        f"{where}: {key} is {id_!r}, which is no token id: write the mask token's id there, a whole number"
    )


def _is_id(value: Any) -> bool:
    return type(value) is int  # JSON's true is an int to isinstance


def mask_of(folder: Path) -> Mask | None:
    """The mask that a drafter's config names."""
    id_ = mask_id_of(read_json(folder / "config.json"))
    return None if id_ is None else Mask(id_, tokens_by_id(load_tokenizer(folder)).get(id_))


def free_mask(
    folder: Path,
    named: str | int | None = None,
    used: Collection[int] = (),
    padding: bool = True,
    *,
    key: str = "mask_token",
    origin: str = "",
) -> Mask:
    """A mask for the drafter in `folder`: the `named` token or id, else a spare special token or, where `padding` allows it,
    a padding row; none of the ids in `used`, which texts hold. `key`: under which the verb at hand takes another one;
    `origin`: where the named one comes from, if not from there.

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
            raise InputError(
                f"{key}={named}{origin}: {folder} has no such token or row ({rows} rows): name another one: {key}=…"
            )
        if id_ in taken:
            raise InputError(f"{key}={named}{origin}: not free, {taken[id_]}: name another one: {key}=…")
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
        f"that no text here holds: {key}=…"
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
    named, rows, where = named_masks(side.config), side.text.get("vocab_size"), "mask token"
    ids = {key: id_ for key, id_ in named.items() if id_ is not None}
    if not ids:
        return []
    (key, id_), said = next(iter(named.items())), ", ".join(f"{k} {v}" for k, v in ids.items())
    if id_ is None:
        what = f"the drafter's mask id ({said}) stands behind {key}, which is null, and vLLM reads that: no mask"
        return [Finding("warns", what, where, f"take {key} out of its config.json")]
    fix = "make the drafter again with `draftsmith init mask_token=…` and distil it"
    if not _is_id(id_):
        what = f"the drafter's mask id is {id_!r} ({key}), which is no token id"
        return [
            Finding("blocks", what, where, f"write the id there that it was trained with, or {fix}", stops=("vllm",))
        ]
    if rows is not None and not 0 <= id_ < rows:
        what = f"the drafter's mask id is {id_} ({key}), its rows end at {rows - 1}"
        return [Finding("blocks", what, where, fix, stops=("vllm",))]
    findings = []
    if any(other != id_ for other in ids.values()):
        what = f"the drafter's config names several mask ids ({said}); vLLM reads {key}"
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
    key = next(iter(named_masks(config)), "pard_token")
    if key == "dflash_config.mask_token_id":
        return config | {"dflash_config": config["dflash_config"] | {"mask_token_id": mask_id}}
    return config | {key: mask_id}
