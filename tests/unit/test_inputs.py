"""What a draft is trained and tested on: a prompt is on one side only, whatever way its answers came about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distill.answers import Answer, open_answers
from distill.inputs import open_inputs
from distill.prompts import prompt
from pairing.errors import InputError
from pairing.init import init_drafter
from pairing.source import resolve
from recipes.generate import main
from tests import tiny
from tests.stored_answers import made_up, store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/, and one file of chats answered in four ways: given/, every/, last/ and system/; other/ is of another."""
    place = tmp_path_factory.mktemp("place")
    # no padding rows, which random weights would say
    target = tiny.folder(place / "target", layers=2, rows=tiny.REAL_TOKENS)
    init_drafter(resolve(str(target)), place / "draft", [0, 1])
    for name, word in (("c", "Ship"), ("d", "Send")):
        chats = [
            [{"role": "user", "content": f"{word} {i} lamps"}, {"role": "assistant", "content": f"{i} it is"}]
            for i in range(4)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    sets = {
        "given": {"prompts": place / "c.jsonl", "answers": "given"},
        "every": {"prompts": place / "c.jsonl", "answers": "every"},
        "last": {"prompts": place / "c.jsonl", "answers": "last"},
        "system": {"prompts": place / "c.jsonl", "answers": "every", "system": "Be brief."},
        "other": {"prompts": place / "d.jsonl", "answers": "every"},
    }
    words = [f"sets.{name}.{key}={value}" for name, one in sets.items() for key, value in one.items()]
    words += [f"sets.{name}.max_tokens=4" for name in sets]
    assert main([f"target={target}", f"out={place / 'out'}", "backend=transformers", "top_logprobs=8", *words]) == 0
    return place


def opened(place: Path, data: Path, heldout: Path) -> int:
    """The rows to test on."""
    return len(open_inputs(place / "draft", data, {"x": heldout}, None, lambda _: None)[1]["x"])


@pytest.mark.parametrize(
    ("data", "heldout"),
    [("given", "every"), ("every", "given"), ("last", "given"), ("system", "every"), ("given", "system")],
)
def test_one_file_answered_in_two_ways_is_on_both_sides(place: Path, data: str, heldout: str) -> None:
    folders = [place / "out" / name for name in (data, heldout)]
    ids = [set(open_answers(folder).data["id"]) for folder in folders]
    assert not ids[0] & ids[1], "ids do not tell it"
    with pytest.raises(
        InputError, match=r"^heldout\.x: 4 of its prompts are trained on too, \w+ first: its figures"
    ) as e:
        opened(place, *folders)
    assert "\n" not in str(e.value)


def test_other_prompts_pass(place: Path) -> None:
    assert opened(place, place / "out" / "given", place / "out" / "other") == 4


def said(*texts: str) -> list[Answer]:
    """A row a text; of "a / b", a chat of two turns, the rows id and id.2 of a template that rewrites its history."""
    named = []
    for text in texts:
        chat = prompt([{"role": "user", "content": turn} for turn in text.split(" / ")])
        for n in range(len(chat.messages)):
            row = f".{n + 1}" if n else ""
            named.append(replace(chat, id=chat.id + row, messages=chat.messages[: n + 1]))
    return [replace(one, prompt=name) for one, name in zip(made_up([5] * len(named)), named, strict=True)]


@pytest.mark.parametrize(
    ("data", "heldout", "both"),
    [
        (["Ship 3 lamps, now!", "x"], ["ship 3 lamps now", "y"], 1),
        (["a / b", "x"], ["A. / B!", "y"], 1),
        (["hi / b", "x"], ["hi / c", "y"], 0),  # chats that begin alike are not one
        (["?"], ["!"], 0),  # of signs alone there is no text to compare
        (["?", "x"], ["?"], 1),
    ],
)
def test_texts_tell_prompts_apart(place: Path, tmp_path: Path, data: list[str], heldout: list[str], both: int) -> None:
    folders = [
        store(tmp_path / name, said(*texts), place / "target", rows=tiny.REAL_TOKENS)
        for name, texts in (("d", data), ("h", heldout))
    ]
    if both:
        with pytest.raises(InputError, match=rf"heldout\.x: {both} of its prompts are trained on too"):
            opened(place, *folders)
    else:
        assert opened(place, *folders) == sum(len(text.split(" / ")) for text in heldout)
