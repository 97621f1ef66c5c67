"""A draft and the answers to train and test it on, checked as one before a weight is read or a file is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.answers import Answers, open_answers, require_target
from distill.batches import SLICE, Rows, check_rows, ids_in
from distill.guards import supervised_or_stop
from distill.prompts import Prompt, plain_text
from pairing.errors import InputError
from pairing.files import digest_json, read_json
from pairing.mask_token import Mask, free_mask, mask_id_of
from pairing.pair import read_pair
from pairing.source import load_tokenizer, resolve


def open_inputs(
    draft: Path, data: Path, heldout: Mapping[str, Path], target: str | None, note: Callable[[str], None]
) -> tuple[Rows, dict[str, Rows]]:
    """The answers to train and to test on.

    Raises InputError where the draft is quantized, answers are not `target`'s (or, without one, not those of the target that the
    draft was made for) or do not fit the draft, a held-out prompt is trained on, or nothing (or everything) is supervised. `note`
    gets what is worth a line.
    """
    pair, model = read_pair(draft), read_json(draft / "config.json")
    if "quantization_config" in model:
        raise InputError(f"{draft}: its weights are quantized: distil the drafter first, then quantize it")
    real = max(load_tokenizer(draft).get_vocab().values()) + 1
    folders = {"data": data} | {f"heldout.{name}": folder for name, folder in heldout.items()}
    sets = {name: open_answers(folder) for name, folder in folders.items()}
    for name, answers in sets.items():
        if target is not None:
            require_target(answers, resolve(target))
        _require_tokens(name, answers, pair, note)
    limits = {"rows": model["vocab_size"], "real": real, "context": model["max_position_embeddings"]}
    rows = {name: check_rows(answers, f"{name} ({folders[name]})", **limits) for name, answers in sets.items()}
    for name, answers in sets.items():
        _require_made_for(name, answers, pair, target, note)
    _require_apart(sets)
    for name, r in rows.items():
        supervised, tokens = int(r.supervised_P.sum()), int(r.tokens_P.sum())
        supervised_or_stop(name, supervised, tokens)
        note(f"{name}: {len(r)} prompts, {supervised:,} supervised of {tokens:,} tokens ({r.share:.1%})")
    temperatures = {name: answers.temperature for name, answers in sets.items()}
    answered_at = temperatures.pop("data")
    for name, other in temperatures.items():
        if other is not None and answered_at is not None and other != answered_at:
            note(
                f"{name}: drawn at temperature {other:g}, data at {answered_at:g}: its figures are not of what is trained on"
            )
    return rows.pop("data"), {name.removeprefix("heldout."): r for name, r in rows.items()}


def _require_apart(sets: Mapping[str, Answers]) -> None:
    """Raises InputError where a prompt of a held-out set is one of `data` too: by what its users say, as `heldout_split` tells
    prompts apart, since an id is of the whole chat, with a system message and with the answers where they were given."""
    train = set(_texts(sets["data"]).values())
    for name, answers in sets.items():
        both = [] if name == "data" else [id_ for id_, text in _texts(answers).items() if text in train]
        if both:
            raise InputError(
                f"{name}: {len(both)} of its prompts are trained on too, {both[0]} first: its figures would mean "
                "nothing; generate it from other prompts"
            )


def _texts(answers: Answers) -> dict[str, str]:
    """A digest of what the users say in each chat, by its id. A chat may be several rows, id, id.2 …, of which the longest
    holds it whole."""
    said: dict[str, tuple[int, str]] = {}
    chats = answers.data.select_columns(["id", "messages"])
    for start in range(0, len(chats), SLICE):
        columns = chats[start : start + SLICE]
        for row, messages in zip(columns["id"], columns["messages"], strict=True):
            id_ = row.split(".")[0]
            if len(messages) > said.get(id_, (0, ""))[0]:
                text = plain_text(Prompt(id_, json.loads(messages)))
                # of signs alone no text is left, which would make one prompt of all those
                said[id_] = (len(messages), digest_json(text or messages))
    return {id_: digest for id_, (_, digest) in said.items()}


def choose_mask(draft: Path, texts: Sequence[Rows], named: str | int | None, rows_learn: bool) -> Mask:
    """The mask of parallel drafting: the `named` token or id, else the one in the draft's config, else a spare special token;
    in no case one that a text holds. `rows_learn`: the vocabulary's rows are trained too.

    Raises InputError where there is none, or what it learnt would not be written: a padding row of a tied head is held at
    the mean of the real ones, so that it is never drafted.
    """
    config, used = read_json(draft / "config.json"), set().union(*(ids_in(rows) for rows in texts))
    own = mask_id_of(config, str(draft / "config.json")) if named is None else None
    origin = "" if own is None else " (as the draft's config.json says)"
    mask = free_mask(draft, named if own is None else own, used, padding=False, key="masks.token", origin=origin)
    if mask.token is None and rows_learn and config.get("tie_word_embeddings", True):
        raise InputError(
            f"masks.token={mask.id}{origin} is a padding row of a tied head, which does not learn: train with trainable=layers, "
            "or name a spare special token: masks.token=…"
        )
    return mask


def require_reference(folder: Path, draft: Path) -> None:
    """Raises InputError where `folder`, a drafter to compare with, is not of the draft's vocabulary."""
    path = resolve(str(folder)).path
    have, rows = (read_json(p / "config.json")["vocab_size"] for p in (path, draft))
    if have != rows:
        raise InputError(
            f"reference={folder}: {have} vocabulary rows, the draft has {rows}: it must be a drafter of this target"
        )
    if load_tokenizer(path).get_vocab() != load_tokenizer(draft).get_vocab():
        raise InputError(
            f"reference={folder}: its tokenizer gives other ids than the draft's: it must be a drafter of this target"
        )


def _require_tokens(name: str, answers: Answers, pair: dict[str, Any], note: Callable[[str], None]) -> None:
    if answers.meta.get("turns") == "given":
        note(f"{name}: its answers are not the target's own, so acceptance on them is not what serving gives")
    was, made_for = answers.meta["target"], pair["target"]
    if was["digests"]["tokenizer"] != made_for["digests"]["tokenizer"]:
        raise InputError(
            f"{name}: these answers are in the tokens of {was['name']}, the draft was made for {made_for['name']}, and "
            "their tokenizers differ: make the draft from that target with `draftsmith init`"
        )


def _require_made_for(
    name: str, answers: Answers, pair: dict[str, Any], target: str | None, note: Callable[[str], None]
) -> None:
    """Raises InputError where the answers are of another model than the draft was made for, and no `target` says that this is
    meant: a target that was tuned on since then, say."""
    was, made_for = answers.meta["target"], pair["target"]
    differ = [part for part, digest in made_for["digests"].items() if was["digests"].get(part) != digest]
    if not differ:
        return
    parts = ", ".join(differ)
    what = f"{name}: written by {was['name']}, the draft was made for {made_for['name']}, which differs in its {parts}"
    if target is None and {"weights", "template"} & {*differ}:
        raise InputError(
            f"{what}: generate answers with that one, or, where the pair will be served with {was['name']}, say so: "
            f"target={was['name']}"
        )
    note(what)
