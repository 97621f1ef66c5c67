"""Where each vocabulary row of a drafter comes from when it is made out of another vocabulary's rows, and the rows made so.

Shapes: V rows of the donor, R rows of the result, H width.

A row that no token uses ("padding") and a row about which the donor knows nothing become the mean of the donor's real
rows. Zeros would not do: where every real logit is negative, a logit of 0 wins. The mean lies in the convex hull of
the real rows, so for every hidden state h its logit w̄·h is at most the largest real logit, and by Jensen's inequality
exp(w̄·h) is at most the mean of the real exponentials: it is never the only argmax, and it gets at most 1/n of the
probability of n real tokens together. Nothing else that is linear in h can promise more: −h turns every logit round.
(vLLM masks only what lies beyond the config's vocab_size; transformers masks nothing; our training masks from the
first padding id on.) Up to the rounding of the stored type, and as long as the real rows stay where they are: after
training an untied head its padding is settled again, `settle_padding`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pairing.errors import InputError

if TYPE_CHECKING:
    import torch

ROLES = ("eos", "bos", "unk", "pad", "sep", "cls", "mask")  # pad last: where pad = eos, the token is the eos
SPACE = "▁"  # how SentencePiece writes a space


@dataclass(frozen=True)
class Row:
    """How one row is made: the mean of the donor's rows `of`; all its real ones where that is empty."""

    how: str  # "user", "copied", "role", "pieces" or "mean"
    of: tuple[int, ...]


def row_sources(target: Any, donor: Any, donor_rows: int, mapping: Mapping[str, str] | None = None) -> dict[int, Row]:
    """The source of every id that the target's tokenizer uses, from tokens of the donor's that have a row.

    `mapping` is the user's word, target's token to donor's token, and goes before everything. Special tokens are mapped
    by their string, else by their role (eos, bos, …), else not at all: never by cutting their text, which only looks
    like markup to the donor (fault D5). Others are copied where the same bytes are one token of the donor's, else
    composed of the longest pieces that are. Raises InputError where `mapping` names a token that is not there.
    """
    theirs = {str(t): int(i) for t, i in donor.get_vocab().items() if int(i) < donor_rows}
    ours = {str(t): int(i) for t, i in target.get_vocab().items()}
    for token, to in (mapping or {}).items():
        if token not in ours or to not in theirs:
            name, where = (token, "target") if token not in ours else (to, "donor")
            raise InputError(f"map {token!r}: {to!r}: the {where}'s tokenizer has no token {name!r}")
    special = special_ids(target)
    donor_special = special_ids(donor)
    surface, donor_surface = surface_of(target), surface_of(donor)
    # the same bytes twice ('d' and '<0x64>'): the shorter string is the one that texts are cut into
    order = sorted(theirs.items(), key=lambda item: (-len(item[0]), -item[1]))
    plain = {donor_surface(t): i for t, i in order if i not in donor_special}
    longest = max(map(len, plain), default=0)
    by_role = {role: getattr(donor, f"{role}_token_id", None) for role in ROLES}
    have = set(theirs.values())  # a role's id may lie above the donor's rows
    roles = {getattr(target, f"{r}_token_id", None): by_role[r] for r in reversed(ROLES) if by_role[r] in have}
    sources = {}
    for token, i in ours.items():
        if mapping and token in mapping:
            sources[i] = Row("user", (theirs[mapping[token]],))
        elif i in special:
            role = roles.get(i)
            if token in theirs and theirs[token] in donor_special:
                sources[i] = Row("copied", (theirs[token],))
            else:
                sources[i] = Row("role", (int(role),)) if role is not None else Row("mean", ())
        else:
            text = surface(token)
            pieces = (plain[text],) if text in plain else _pieces(text, plain, longest)
            sources[i] = Row("copied" if text in plain else "pieces" if pieces else "mean", pieces)
    return dict(sorted(sources.items()))


def _pieces(text: bytes, plain: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    """The longest donor token first, from the left; () where some byte is in none of them."""
    pieces = []
    at = 0
    while at < len(text):
        end = next((e for e in range(min(len(text), at + longest), at, -1) if text[at:e] in plain), None)
        if end is None:
            return ()
        pieces.append(plain[text[at:end]])
        at = end
    return tuple(pieces)


def special_ids(tokenizer: Any) -> set[int]:
    """Every id that is markup, not text: the named roles and all added tokens that are flagged special."""
    added = {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | {int(i) for i in tokenizer.all_special_ids}


def surface_of(tokenizer: Any) -> Any:
    """A function from a token's string to the bytes it stands for, so that vocabularies of two families compare.

    Byte-level tokenizers write every byte as a printable character ('Ġ' is a space), SentencePiece's write '▁' for a
    space and '<0x0A>' for a byte.
    """
    raw = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(raw.to_str()) if raw is not None else {}
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    parts = json.dumps([spec.get("decoder"), spec.get("pre_tokenizer")])
    if '"ByteLevel"' in parts:
        table = byte_level_alphabet()
        return lambda t: t.encode() if t in added or any(c not in table for c in t) else bytes(table[c] for c in t)

    def sentencepiece(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.encode() if token in added else token.replace(SPACE, " ").encode()

    return sentencepiece


def byte_level_alphabet() -> dict[str, int]:
    """The printable character of each byte, as GPT-2 defined it: its own where it has one, else from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(rest)}


def make_rows(weight_VH: torch.Tensor, sources: Mapping[int, Row], real: Collection[int], rows: int) -> torch.Tensor:
    """[R, H] (or [R] from a bias) in the donor's type: the rows of `sources`, the mean of the `real` rows elsewhere.

    A row copied from one donor row is bit-identical to it; means are taken in float32.
    """
    out = mean_row(weight_VH, real).to(weight_VH.dtype).repeat(rows, *[1] * (weight_VH.ndim - 1))
    one = {i: row.of[0] for i, row in sources.items() if len(row.of) == 1}
    out[list(one)] = weight_VH[list(one.values())]
    for i, row in sources.items():
        if len(row.of) > 1:
            out[i] = weight_VH[list(row.of)].float().mean(0).to(weight_VH.dtype)
    return out


def mean_row(weight_VH: torch.Tensor, real: Collection[int]) -> torch.Tensor:
    """The mean of the real rows, float32."""
    return weight_VH[sorted(real)].float().mean(0)


def settle_padding(weight_VH: torch.Tensor, real: Collection[int]) -> torch.Tensor:
    """A copy whose rows outside `real` are the mean of those within, so that no padding id can win the argmax."""
    out = weight_VH.clone()
    padding = sorted(set(range(len(weight_VH))) - set(real))
    out[padding] = mean_row(weight_VH, real).to(weight_VH.dtype)
    return out
