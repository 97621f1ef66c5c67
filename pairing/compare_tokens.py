"""Two tokenizers: their tokens id by id, and how they cut the same texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pairing.finding import ONE_VOCABULARY, Finding

SHOWN = 3  # differing ids that a finding spells out
ADDED_TRIED = 256
RUN = 64

# What tokenizers of one family are known to cut differently: spaces, digits, scripts, code, emoji, odd Unicode.
TEXTS = (
    "The quick brown fox can't jump over the 13 lazy dogs, e.g. at 9:30 p.m.; they'd rather sleep there.",
    "  two spaces,\ttab,\n\n newlines \r\n and trailing spaces   ",
    "0 7 42 1234567890 3.14159 -1e-9 1,000,000 0x1F",
    'def f(x: int) -> str:\n    return {"key": [x ** 2, None]}  # café\n',
    '{"name": "Zoë", "quantity": 24, "items": ["red pens"], "total": 3.5}',
    "SELECT a.id FROM t AS a WHERE a.x >= 10 AND b != 'it''s';",
    "Ein Überfall, où ça, ¿qué tal?, żółć, İstanbul, naïve, straße",
    "Привет, мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم.",
    "你好，世界。こんにちは世界。안녕하세요 세계. नमस्ते दुनिया. สวัสดีชาวโลก",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ed \u2764\ufe0f \u2713",
    "e\u0301 vs \u00e9, \ufb01 vs fi, \u00a0 no-break, \u200b zero width, \u2028 line",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt",
    "aaaaaaaaaaaaaaaaaaaaaaaa ______ ====== ////// ......",
    "<|im_start|>user\n<s>[INST] text that looks like markup </s><|endoftext|>",
)


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Every id in use and its string, added tokens included. Never bounded by len() or vocab_size: ids may have holes
    and an added id may lie above both (fault D4)."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    return dict(zip(vocab.values(), vocab.keys(), strict=True))


def compare_tokens(target: dict[int, str], drafter: dict[int, str]) -> list[Finding]:
    """Id by id up to the highest one in use on either side."""
    # a loop over 150,000 ids takes as long as loading a tokenizer, and most pairs are equal
    ids = [] if target == drafter else sorted({*target, *drafter})
    differ = [i for i in ids if i in target and i in drafter and target[i] != drafter[i]]
    lacks = [i for i in ids if i in target and i not in drafter]
    extra = [i for i in ids if i in drafter and i not in target]
    findings = []
    if differ:
        moved = sorted(target[i] for i in differ) == sorted(drafter[i] for i in differ)
        shown = "; ".join(
            f"id {i} is {target[i]!r} in the target, {drafter[i]!r} in the drafter" for i in differ[:SHOWN]
        )
        findings.append(
            Finding(
                "blocks",
                f"the vocabularies differ in {len(differ)} ids"
                + (" (the same tokens, moved)" if moved else "")
                + f": {shown}",
                "tokens",
                "choose or make a drafter with the target's tokenizer (`draftsmith init`); "
                "equal sizes do not make equal vocabularies",
                stops=ONE_VOCABULARY,
            )
        )
    if lacks:
        shown = ", ".join(f"{i} {target[i]!r}" for i in lacks[:SHOWN])
        findings.append(
            Finding(
                "repairable",
                f"the drafter's tokenizer lacks {len(lacks)} of the target's ids: {shown}",
                "tokens",
                "copies the target's tokenizer and initialises these rows; train them: the drafter has never seen them",
                repair=True,
                stops=ONE_VOCABULARY,
            )
        )
    if extra:
        shown = ", ".join(f"{i} {drafter[i]!r}" for i in extra[:SHOWN])
        findings.append(
            Finding(
                "warns",
                f"the drafter's tokenizer has {len(extra)} ids that the target's has not: {shown}",
                "tokens",
                "copies the target's tokenizer; a proposal of such an id is always rejected",
                repair=True,
            )
        )
    if not differ and not lacks:
        holes = max(target) + 1 - len(target)
        findings.append(
            Finding(
                "info", f"{len(target)} tokens equal id by id, highest id {max(target)}, {holes} holes", "tokens", ""
            )
        )
    return findings


def compare_segmentation(target: Any, drafter: Any, ids: Iterable[int]) -> list[Finding]:
    """The same texts through both: equal strings at equal ids still leave merges, normalizers and pre-tokenizers.

    Beside the built-in texts: each added token within a text, for its own rules (stripped spaces, whole words only),
    and the whole vocabulary as text, a run of neighbouring ids at a time, so that every merge is asked for. `ids`: those
    in use in the target.
    """
    if _one_function(target, drafter):
        return [Finding("info", "equal tokenizers: all texts are cut alike", "segmentation", "")]
    added = [str(token) for token in target.added_tokens_decoder.values()][:ADDED_TRIED]
    ids = sorted(ids)
    runs = target.backend_tokenizer.decode_batch([ids[i : i + RUN] for i in range(0, len(ids), RUN)])
    texts = [*TEXTS, *(f"a{token} b {token}c" for token in added), *runs]
    # in one call each: on a large vocabulary the runs are thousands
    cuts = [tok(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"] for tok in (target, drafter)]
    differ = [(text, a, b) for text, a, b in zip(texts, *cuts, strict=True) if a != b]
    if differ:
        text, a, b = differ[0]
        at = first_difference(a, b)
        what = (
            f"{len(differ)} of {len(texts)} texts are cut differently, first {text[:40]!r}: "
            f"from token {at} on {a[at : at + 6]} in the target, {b[at : at + 6]} in the drafter"
        )
        # nobody is stopped: all of them cut texts with the target's tokenizer, and the ids mean the same
        return [Finding("repairable", what, "segmentation", "copies the target's tokenizer", repair=True, stops=())]
    a, b = (tok("a")["input_ids"] for tok in (target, drafter))
    if a != b:
        what = f"the tokenizers add other special tokens: 'a' is {a} in the target, {b} in the drafter"
        fix = "none needed: serving uses the target's tokenizer only, and so does draftsmith's training"
        return [Finding("warns", what, "segmentation", fix)]
    return [Finding("info", f"{len(texts)} texts are cut alike", "segmentation", "")]


def _one_function(a: Any, b: Any) -> bool:
    """Whether both are one function of a text because they are made alike: one class around one serialized tokenizer
    (normalizer, pre-tokenizer, vocabulary, merges, added tokens, post-processor), beside which the class has this flag only.
    """
    return a is b or (
        type(a) is type(b)
        and a.split_special_tokens == b.split_special_tokens
        and a.backend_tokenizer.to_str() == b.backend_tokenizer.to_str()
    )


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
