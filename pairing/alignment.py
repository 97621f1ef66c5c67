"""Whether a target and a drafter fit: token by token, row by row, and what each misfit means and how to mend it.

Aligned means that nothing blocks and nothing needs repair. Weights are never read: rows come from the safetensors
headers. docs/check.md describes the report.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pairing.files import read_json
from pairing.finding import LEVELS, ONE_VOCABULARY, USERS, Finding
from pairing.rows import special_ids
from pairing.serving import compare_context, context, engine_findings, overridden, shard_findings, stateful, text_config
from pairing.source import ModelSource, load_tokenizer, require_causal
from pairing.weights import EMBEDDINGS, HEADS, PACKED, TensorInfo, find, read_headers

SHOWN = 3  # differing ids that a finding spells out
MARKER = "xyzzy"  # an answer that no template writes by itself
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
TALKS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
    [
        {"role": "user", "content": " 2 + 2? "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Thanks\n"},
    ],
)


@dataclass(frozen=True)
class Side:
    """One model of the pair, with what the comparisons need."""

    name: str
    path_like: bool  # the name is a folder, not a hub id
    config: dict[str, Any]
    tokenizer: Any
    generation: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def text(self) -> dict[str, Any]:
        return text_config(self.config)


def read_side(source: ModelSource) -> Side:
    """Raises InputError where a part does not load (a corrupt tokenizer, torn weights) or the model writes no text."""
    generation = source.path / "generation_config.json"
    config = read_json(source.path / "config.json")
    require_causal(config, source.name)
    return Side(
        source.name,
        Path(source.name).exists(),
        config,
        load_tokenizer(source.path),
        read_json(generation) if generation.is_file() else {},
        read_headers(source.path),
    )


def check_pair(
    target: ModelSource,
    drafter: ModelSource,
    *,
    hf_overrides: Mapping[str, Any] | None = None,
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """The alignment report, JSON as it stands: "aligned", "verdict", "target", "drafter", "facts", "needs", "repair",
    "findings".

    "findings" are `Finding` dicts, the gravest first. "facts" holds the counts that other parts use: "highest_id",
    "target_rows", "drafter_rows", "max_model_len" (what both can take; None where neither says). "needs" says for each
    of `USERS` whether the pair runs there, and what stops it. "repair" is the command that mends it, where one does.
    `hf_overrides` are those that the target is served with: vLLM does not hand them on to the drafter.
    """
    t, d = read_side(target), read_side(drafter)
    t = replace(t, config=overridden(t.config, hf_overrides))
    t_tokens, d_tokens = tokens_by_id(t.tokenizer), tokens_by_id(d.tokenizer)
    token_findings = compare_tokens(t_tokens, d_tokens)
    same = not any(f.level == "blocks" for f in token_findings)
    findings = [
        *token_findings,
        *compare_rows(t, d, max(t_tokens), max(*t_tokens, *d_tokens), same),
        *head_findings(t, "target"),
        *head_findings(d, "drafter"),
        *compare_special_ids(t, d),
        *(compare_segmentation(t.tokenizer, d.tokenizer) if same else []),
        *compare_templates(t.tokenizer, d.tokenizer),
        *compare_context(t.text, d.text, hf_overrides),
        *engine_findings(t.config, d.config),
        *shard_findings(t.config, "target", tensor_parallel_size),
        *shard_findings(d.config, "drafter", tensor_parallel_size),
    ]
    findings.sort(key=lambda f: LEVELS.index(f.level))
    aligned = not any(f.level in ("blocks", "repairable") for f in findings)
    command = None
    if any(f.repair for f in findings) and not any(f.level == "blocks" for f in findings):
        name = d.name.rstrip("/")
        out = f"{name if d.path_like else name.split('/')[-1]}-repaired"
        command = shlex.join(["draftsmith", "repair", t.name, d.name, f"out={out}"])
        findings = [replace(f, fix=f"`{command}`: {f.fix}") if f.repair else f for f in findings]
    lengths = [n for n in (context(t.text), context(d.text)) if n is not None]
    return {
        "aligned": aligned,
        "verdict": _verdict(findings, aligned),
        "target": t.name,
        "drafter": d.name,
        "facts": {
            "highest_id": max(t_tokens),
            "target_rows": t.text.get("vocab_size"),
            "drafter_rows": d.text.get("vocab_size"),
            "max_model_len": min(lengths) if lengths else None,
        },
        "needs": needs(findings, t.text.get("vocab_size") == d.text.get("vocab_size"), stateful(t.config)),
        "repair": command,
        "findings": [asdict(f) | {"stops": list(f.stops)} for f in findings],
    }


def needs(findings: Sequence[Finding], equal_rows: bool, stateful_target: bool) -> dict[str, dict[str, Any]]:
    """For each of `USERS`: {"runs", "because"}, the findings that stop it, or what it asks for where it runs.

    The two refusals beside the findings are transformers' own (`_validate_generation_mode`, 5.19).
    """
    asks = {
        "vllm": "equal vocab_size in both configs; ids are taken over as they are",
        "transformers": "generate(assistant_model=…) without tokenizers",
        "universal": "generate(assistant_model=…, tokenizer=…, assistant_tokenizer=…)",
        "training": "the target's tokenizer, template and rows",
    }
    result = {}
    for user in USERS:
        grave = [f.what for f in findings if f.level in ("blocks", "repairable") and user in f.stops]
        if user == "universal" and equal_rows:
            grave.append("transformers refuses two tokenizers where both configs have one vocab_size")
        if user in ("transformers", "universal") and stateful_target:
            grave.append(
                "transformers does not assist a target that keeps a state: it cannot be cut back to what was accepted"
            )
        result[user] = {"runs": not grave, "because": grave or [asks[user]]}
    return result


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What pair.json keeps of a report: verdict, facts, how many findings of each level, all but the "info" ones."""
    levels = [f["level"] for f in report["findings"]]
    return {
        "aligned": report["aligned"],
        "verdict": report["verdict"],
        "target": report["target"],
        **report["facts"],
        "levels": {level: levels.count(level) for level in LEVELS},
        "findings": [f for f in report["findings"] if f["level"] != "info"],
    }


def _verdict(findings: list[Finding], aligned: bool) -> str:
    if aligned:
        warnings = sum(f.level == "warns" for f in findings)
        return "aligned" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else "")
    return f"not aligned: {findings[0].what}"


# Tokens


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Every id in use and its string, added tokens included. Never bounded by len() or vocab_size: ids may have holes
    and an added id may lie above both (fault D4)."""
    return {int(i): str(token) for token, i in tokenizer.get_vocab().items()}


def compare_tokens(target: dict[int, str], drafter: dict[int, str]) -> list[Finding]:
    """Id by id up to the highest one in use on either side."""
    ids = range(max(*target, *drafter) + 1)
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


def compare_special_ids(target: Side, drafter: Side) -> list[Finding]:
    """Roles as resolved id sets: tokenizer and generation config together, an eos given as a list or as a number (D3).

    The engine ends answers by the target's ids alone, so a drafter that says otherwise warns and never blocks.
    """
    findings = []
    t, d = resolved_ids(target), resolved_ids(drafter)
    for role in t:
        if t[role] != d[role]:
            findings.append(
                Finding(
                    "info" if role in ("pad", "unk") else "warns",
                    f"{role} ids are {sorted(t[role])} in the target, {sorted(d[role])} in the drafter",
                    "special ids",
                    "copies the target's tokenizer and generation config",
                    repair=role not in ("pad", "unk"),
                )
            )
    if not t["eos"]:
        findings.append(
            Finding(
                "warns",
                "the target names no eos id: its answers end by length only",
                "special ids",
                "set eos_token_id in its generation_config.json",
            )
        )
    generation, own = _ids(target.generation.get("eos_token_id")), _ids(target.tokenizer.eos_token_id)
    if generation and own and not own <= generation:
        findings.append(
            Finding(
                "warns",
                f"the target's tokenizer ends with {sorted(own)}, its generation config with {sorted(generation)}: "
                "vLLM stops at either, transformers at the second only",
                "special ids",
                "name all ids in eos_token_id of the target's generation_config.json",
            )
        )
    ending = turn_end(target.tokenizer)
    if ending is not None and t["eos"] and ending not in t["eos"]:
        findings.append(
            Finding(
                "warns",
                f"the target's template ends a turn with {target.tokenizer.convert_ids_to_tokens(ending)!r} (id {ending}), "
                f"its eos ids are {sorted(t['eos'])}: answers run on past their end",
                "special ids",
                "name that id too in eos_token_id of the target's generation_config.json",
            )
        )
    t_special, d_special = set(target.tokenizer.all_special_ids), set(drafter.tokenizer.all_special_ids)
    if t_special != d_special:
        findings.append(
            Finding(
                "info",
                f"ids special on one side only: {sorted(t_special ^ d_special)[:SHOWN]}",
                "special ids",
                "",
            )
        )
    return findings


def resolved_ids(side: Side) -> dict[str, set[int]]:
    """The ids of each role, from the tokenizer and from the generation config (the config where there is none)."""
    rest = side.generation or side.text
    return {
        role: _ids(getattr(side.tokenizer, f"{role}_token_id", None)) | _ids(rest.get(f"{role}_token_id"))
        for role in ("eos", "bos", "pad", "unk")
    }


def turn_end(tokenizer: Any) -> int | None:
    """The first special id after an assistant's turn as the template renders it; None where there is none."""
    if not tokenizer.chat_template:
        return None
    turn = _render(tokenizer, [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": MARKER}], False)
    _, found, rest = turn.rpartition(MARKER)
    special = special_ids(tokenizer)
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if found else []
    return next((int(i) for i in ids if i in special), None)


def _ids(value: Any) -> set[int]:
    return set() if value is None else {int(v) for v in value} if isinstance(value, list) else {int(value)}


def compare_segmentation(target: Any, drafter: Any) -> list[Finding]:
    """The same texts through both: equal strings at equal ids still leave merges, normalizers and pre-tokenizers.

    Beside the built-in texts: each added token within a text, for its own rules (stripped spaces, whole words only),
    and the whole vocabulary as text, a run of neighbouring ids at a time, so that every merge is asked for.
    """
    added = [str(token) for token in target.added_tokens_decoder.values()][:ADDED_TRIED]
    ids = sorted(tokens_by_id(target))
    runs = [target.decode(ids[i : i + RUN]) for i in range(0, len(ids), RUN)]
    texts = [*TEXTS, *(f"a{token} b {token}c" for token in added), *runs]
    # in one call each: on a large vocabulary the runs are thousands
    cuts = [tok(texts, add_special_tokens=False)["input_ids"] for tok in (target, drafter)]
    differ = [(text, list(a), list(b)) for text, a, b in zip(texts, *cuts, strict=True) if list(a) != list(b)]
    if differ:
        text, a, b = differ[0]
        at = _first_difference(a, b)
        what = (
            f"{len(differ)} of {len(texts)} texts are cut differently, first {text[:40]!r}: "
            f"from token {at} on {a[at : at + 6]} in the target, {b[at : at + 6]} in the drafter"
        )
        # nobody is stopped: all of them cut texts with the target's tokenizer, and the ids mean the same
        return [Finding("repairable", what, "segmentation", "copies the target's tokenizer", repair=True, stops=())]
    a, b = (list(tok("a")["input_ids"]) for tok in (target, drafter))
    if a != b:
        what = f"the tokenizers add other special tokens: 'a' is {a} in the target, {b} in the drafter"
        fix = "none needed: serving uses the target's tokenizer only, and so does draftsmith's training"
        return [Finding("warns", what, "segmentation", fix)]
    return [Finding("info", f"{len(texts)} texts are cut alike", "segmentation", "")]


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compare_templates(target: Any, drafter: Any) -> list[Finding]:
    """The same conversations rendered by both templates; what they render counts, not how they are written."""
    if not target.chat_template:
        return [Finding("info", "the target has no chat template", "template", "")]
    copy = "copies the target's template; serving uses the target's in any case"
    if not drafter.chat_template:
        return [Finding("warns", "the drafter has no chat template, the target has one", "template", copy, repair=True)]
    for talk in TALKS:
        for prompt in (False, True):
            a, b = (_render(tok, talk, prompt) for tok in (target, drafter))
            if a != b:
                at = _first_difference(a, b)
                what = (
                    f"the chat templates differ on a conversation of {len(talk)} messages, from character {at}: "
                    f"{a[at : at + 30]!r} in the target, {b[at : at + 30]!r} in the drafter"
                )
                return [Finding("warns", what, "template", copy, repair=True)]
    return [Finding("info", f"{len(TALKS)} conversations are rendered alike", "template", "")]


def _render(tokenizer: Any, talk: list[dict[str, str]], prompt: bool) -> str:
    """The text, or the template's own complaint: both templates may refuse the same roles in the same words."""
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt))
    except Exception as e:  # templates raise jinja2's errors and their own
        return f"(refused: {e})"


# Rows and weights


def compare_rows(target: Side, drafter: Side, target_highest: int, drafter_highest: int, same: bool) -> list[Finding]:
    """Rows of config, embedding and head, against each other and the highest id in use (faults D1, D4, D16).

    `drafter_highest` counts the target's ids too: they are what the drafter is fed. `same`: no token differs.
    """
    findings = []
    for side, role, highest in ((target, "target", target_highest), (drafter, "drafter", drafter_highest)):
        rows = side.text.get("vocab_size")
        for part, info in (("embedding", find(side.tensors, EMBEDDINGS)), ("head", find(side.tensors, HEADS))):
            if info is not None and not _packed(info) and info.shape[0] != rows:
                findings.append(
                    Finding(
                        "blocks",
                        f"the {role}'s {part} has {info.shape[0]} rows, its config says vocab_size {rows}",
                        "rows",
                        "save the model again with vocab_size equal to its rows",
                    )
                )
        if rows is None or highest >= rows:
            mends = role == "drafter" and rows is not None and same and target_highest < int(target.text["vocab_size"])
            findings.append(
                Finding(
                    "repairable" if mends else "blocks",
                    f"id {highest} is in use and the {role} has {rows} rows only",
                    "rows",
                    "adds the rows; train those of real tokens"
                    if mends
                    else f"give the {role} at least {highest + 1} rows, trained ones",
                    repair=mends,
                )
            )
    if findings:
        return findings
    t, d = int(target.text["vocab_size"]), int(drafter.text["vocab_size"])
    if t == d:
        return [Finding("info", f"{t} rows on both sides, {t - target_highest - 1} above the ids in use", "rows", "")]
    if not same:
        what = f"the target has {t} rows, the drafter {d}"
        return [Finding("blocks", what, "rows", "see the tokens above", stops=ONE_VOCABULARY)]
    return [
        Finding(
            "repairable",
            f"same tokenizer, padding differs: the target has {t} rows, the drafter {d}; ids end at {target_highest}",
            "rows",
            f"{'pads' if d < t else 'cuts'} the drafter's embedding and head to {t} rows, the others as they are; "
            "or make a drafter by `draftsmith init`",
            repair=True,
            stops=ONE_VOCABULARY,
        )
    ]


def head_findings(side: Side, role: str) -> list[Finding]:
    """The tied flag against the tensors in the file, and a head that no engine reads."""
    from transformers import CONFIG_MAPPING

    head = find(side.tensors, HEADS)
    tied = side.config.get("tie_word_embeddings", side.text.get("tie_word_embeddings"))
    if tied is None and side.config.get("model_type") in CONFIG_MAPPING:
        tied = CONFIG_MAPPING[side.config["model_type"]].from_dict(side.config).get_text_config().tie_word_embeddings
    if head is not None and _packed(head):
        return [
            Finding(
                "blocks",
                f"the {role}'s head is quantized ({head.dtype}); vLLM reads heads in 16 or 32 bit",
                "head",
                "quantize it again without the head (`draftsmith quantize`)",
                stops=("vllm",),
            )
        ]
    if tied and head is not None:
        return [
            Finding(
                "warns",
                f"the {role}'s config says that the head is tied, and its file holds one: engines drop it",
                "head",
                "where it differs from the embedding set tie_word_embeddings to false, else delete it",
            )
        ]
    if tied is False and head is None:
        return [
            Finding(
                "blocks",
                f"the {role}'s config says that the head is not tied, and its file holds none",
                "head",
                "set tie_word_embeddings to true, or save the head",
            )
        ]
    return []


def _packed(info: TensorInfo) -> bool:
    return info.dtype in PACKED
