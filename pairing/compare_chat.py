"""What ends and opens a turn: special ids by their roles, and chat templates by what they render."""

from __future__ import annotations

from typing import Any

from pairing.compare_tokens import SHOWN, first_difference
from pairing.finding import Finding
from pairing.rows import special_ids
from pairing.side import Side

MARKER = "xyzzy"  # an answer that no template writes by itself
TALKS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
    [
        {"role": "user", "content": " 2 + 2? "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Thanks\n"},
    ],
)


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
                at = first_difference(a, b)
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
