"""Chats of several turns: the target answers each in order, its own answers in the history; spans by prefix rendering.

No template needs to mark what is the assistant's (fault D13): the chat is rendered again at each turn, and where the tokens so
far are a prefix of the new prompt, what follows belongs to the same row. Where they are not (a template that drops thoughts
from the history, an answer that is not segmented as its text would be) a new row begins, so that every answer stands after
exactly the tokens that the target read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distill.answers import Answer
from distill.prompts import Prompt
from distill.requests import Answerer, Completion, Failed, Request, Sampling, render
from pairing.errors import InputError, PartFailedError


@dataclass(frozen=True)
class Text:
    """A text that exists, with the answers in it: what `score` takes. As a row of answers without its distributions."""

    prompt: Prompt
    input_ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass
class Chat:
    """A chat that is being answered."""

    messages: list[dict[str, str]]
    later: deque[dict[str, str]]  # the user's messages still to come
    rows: list[Answer] = field(default_factory=list)


def end_at(failed: Failed) -> None:
    raise PartFailedError(failed.reason)


def converse(
    requests: Sequence[Request],
    sampling: Sampling,
    answer: Answerer,
    tokenizer: Any,
    context: int | None = None,
    note: Callable[[str], None] = lambda _: None,
    fail: Callable[[Failed], None] = end_at,
) -> Iterator[list[Answer]]:
    """The rows of each chat, when all its turns are answered. `requests` are first turns. `note` is told how many chats were
    split into rows, and how many were cut short at `context` tokens. `fail` is told of a turn that cannot be answered; where it
    does not raise, that chat is left out."""
    chats = {}
    for r in requests:
        before = len(r.prompt.messages) - len(r.later)
        chats[r.prompt.id] = Chat(r.prompt.messages[:before], deque(r.later))
    waiting, split, cut = deque(requests), 0, 0
    for done in answer(waiting, sampling):
        if isinstance(done, Failed):
            fail(done)
            del chats[done.request.prompt.id]
            continue
        chat = chats[done.request.prompt.id]
        chat.rows = _with(chat.rows, done, chat.messages)
        if chat.later:
            ids = done.ids[:-1] if done.finish_reason == "stop" else done.ids
            said = {"role": "assistant", "content": _text(tokenizer, ids)}
            chat.messages = [*chat.messages, said, chat.later.popleft()]
            prompt_ids = render(tokenizer, chat.messages, done.request.prompt.id)
            if context is None or len(prompt_ids) + sampling.max_tokens <= context:
                waiting.appendleft(Request(done.request.prompt, prompt_ids, turn=done.request.turn + 1))
                continue
            cut += 1
        del chats[done.request.prompt.id]
        split += len(chat.rows) > 1
        yield chat.rows
    if split:
        note(
            f"{split} chats became several rows: the target's template does not repeat the tokens of an earlier turn (it "
            "rewrites the history, or the answer's text is segmented otherwise); every answer still follows what it answered"
        )
    if cut:
        note(f"{cut} chats were cut short, as their next turn would not have fitted into {context} tokens")


def longest_chat(request: Request, max_tokens: int, tokenizer: Any) -> int:
    """Tokens of a chat whose every answer is as long as it may be; the answers' texts are taken to be segmented as they were
    written."""
    messages: list[dict[str, str]] = []
    for message in request.prompt.messages:
        if messages and messages[-1]["role"] == message["role"] == "user":
            messages.append({"role": "assistant", "content": "."})
        messages.append(message)
    whole = render(tokenizer, messages, request.prompt.id) if request.later else request.prompt_ids
    return len(whole) + (1 + len(request.later)) * max_tokens


def _text(tokenizer: Any, ids: list[int]) -> str:
    """As a server gives it to its client, who sends it back with the next question."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _with(rows: list[Answer], done: Completion, messages: list[dict[str, str]]) -> list[Answer]:
    """`rows` of a chat with one more answer: in the last row, where its tokens begin the new prompt, or in a new one."""
    start, prompt = len(done.request.prompt_ids), done.request.prompt
    ids = done.request.prompt_ids + done.ids
    spans = [(start, len(ids))]
    if rows and _begins(rows[-1].input_ids, done.request.prompt_ids):
        last = rows[-1]
        head_ids = np.concatenate([last.head_ids_NK, done.head_ids_NK])
        head_logprobs = np.concatenate([last.head_logprobs_NK, done.head_logprobs_NK])
        named = replace(last.prompt, messages=messages)
        return [*rows[:-1], Answer(named, ids, last.spans + spans, done.finish_reason, head_ids, head_logprobs)]
    named = replace(prompt, id=_row_id(prompt.id, len(rows)), messages=messages)
    return [*rows, Answer(named, ids, spans, done.finish_reason, done.head_ids_NK, done.head_logprobs_NK)]


def _begins(ids: list[int], longer: list[int]) -> bool:
    return len(ids) <= len(longer) and longer[: len(ids)] == ids


def _row_id(id_: str, row: int) -> str:
    """Further rows of a chat: id.2, id.3 …"""
    return f"{id_}.{row + 1}" if row else id_


def given_texts(one: Prompt, tokenizer: Any, endings: Sequence[int]) -> list[Text]:
    """The chat's own assistant turns as spans, the turn-ending token among them: one text, or several where the template
    rewrites the history.

    Raises InputError where the template does not let an answer be told from what stands around it.
    """
    texts: list[Text] = []
    for at, message in enumerate(one.messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, one.messages[:at], one.id)
        whole = render(tokenizer, one.messages[: at + 1], one.id, answer_next=False)
        if not _begins(before, whole):
            raise InputError(
                f"prompt {one.id}: the target's chat template does not write messages[{at}] after the beginning that it gives "
                "to an answer, so where the answer begins cannot be told: let the target answer (answers=every)"
            )
        ends = [i for i in range(len(before), len(whole)) if whole[i] in endings]
        if not ends:
            raise InputError(
                f"prompt {one.id}: the target's chat template ends messages[{at}] without an ending token (ids "
                f"{', '.join(map(str, endings))}), so where the answer ends cannot be told: let the target answer "
                "(answers=every)"
            )
        ids, spans = whole[: ends[-1] + 1], [(len(before), ends[-1] + 1)]
        if texts and _begins(texts[-1].input_ids, before):
            last = texts.pop()
            texts.append(Text(replace(last.prompt, messages=one.messages[:at]), ids, last.spans + spans))
        else:
            named = replace(one, id=_row_id(one.id, len(texts)), messages=one.messages[:at])
            texts.append(Text(named, ids, spans))
    return texts
