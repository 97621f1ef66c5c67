"""Chats of several turns: which tokens are answers, by prefix rendering (D13), and what happens where a template rewrites."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.in_transformers import open_transformers
from distill.prompts import Prompt, prompt
from distill.requests import Completion, Request, Sampling, tokenize
from distill.turns import converse, given_texts, longest_chat
from pairing.errors import InputError
from pairing.source import load_model, load_tokenizer, resolve
from tests import tiny

GREEDY = Sampling(max_tokens=8, temperature=0.0, top_logprobs=4, seed=0)
ENDINGS = [2]
# an answer that is not the last one is shortened, as thoughts are by templates of reasoning models
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if m['role'] != 'assistant' or loop.last else "
    "m['content'][:1]) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = tiny.CHATML.replace("<|im_start|>assistant\n' }}{% endif", "<|im_start|>assistant\n<think>' }}{% endif")
ENDLESS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chats(*turns: int) -> list[Prompt]:
    """A chat of so many user's messages each."""
    return [
        prompt([{"role": "system", "content": "Hi"}, *(user(f"{i} {n}") for n in range(count))], {"i": i})
        for i, count in enumerate(turns)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy, it writes plain letters and the ending token alone: other ids have no embedding, so no logit above 0."""
    path = tiny.folder(tmp_path_factory.mktemp("target") / "tiny", positions=1024)
    model, words = load_model(path), load_tokenizer(path)
    plain = [i for token, i in words.get_vocab().items() if len(token) == 1 and "!" <= token <= "~"]
    with torch.no_grad():
        keep = torch.zeros(tiny.ROWS, 1)
        keep[[2, *plain]] = 1
        model.get_input_embeddings().weight.mul_(keep)
        model.get_input_embeddings().weight[2] *= 1.5  # ends now and then
    model.save_pretrained(path)
    return path


def talk(target: Path, asked: list[Prompt], template: str = tiny.CHATML, **kwargs: Any) -> list[list[Any]]:
    words = load_tokenizer(target)
    words.chat_template = template
    answer = open_transformers(resolve(str(target)), max_num_seqs=4)
    return list(converse(tokenize(asked, words, "tiny", every_turn=True), GREEDY, answer, words, **kwargs))


def test_every_turn_is_answered_with_the_targets_own_answers_before_it(target: Path) -> None:
    """Rows are what the template makes of the finished chat; spans hold the answers, their ending tokens, nothing else."""
    asked, words, model = chats(3, 1, 2), load_tokenizer(target), load_model(target)
    found = {rows[0].prompt.tags["i"]: rows for rows in talk(target, asked)}
    ends = []
    for i, turns in enumerate((3, 1, 2)):
        (row,) = found[i]
        assert row.prompt.id == asked[i].id
        assert len(row.spans) == turns
        texts = [row.input_ids[start:end] for start, end in row.spans]
        answers = [words.decode([t for t in ids if t != 2]) for ids in texts]
        whole = [asked[i].messages[0]]
        for n, text in enumerate(answers):
            assert (
                words.apply_chat_template([*whole, user(f"{i} {n}")], add_generation_prompt=True, return_dict=False)
                == (row.input_ids[: row.spans[n][0]])
            )
            whole += [user(f"{i} {n}"), said(text)]
        assert row.prompt.messages == whole[:-1]  # what the last answer answers
        with torch.inference_mode():
            logprobs = model(torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
        places = [t - 1 for start, end in row.spans for t in range(start, end)]
        np.testing.assert_allclose(row.head_logprobs_NK, logprobs[places].topk(4).values, atol=1e-4)
        assert logprobs[places].argmax(-1).tolist() == [t for ids in texts for t in ids]
        ends += [ids[-1] == 2 for ids in texts]
        assert row.finish_reason == ("stop" if texts[-1][-1] == 2 else "length")
    assert 0 < sum(ends) < len(ends)  # both kinds of ends went through


def test_a_template_that_rewrites_history_gives_a_row_per_turn(target: Path) -> None:
    """Each answer then stands after exactly what the target read, and nothing is supervised twice."""
    notes: list[str] = []
    asked, words = chats(3, 1), load_tokenizer(target)
    words.chat_template = FORGETFUL
    rows = {rows[0].prompt.tags["i"]: rows for rows in talk(target, asked, FORGETFUL, note=notes.append)}
    assert [row.prompt.id for row in rows[0]] == [asked[0].id, f"{asked[0].id}.2", f"{asked[0].id}.3"]
    assert len(rows[1]) == 1
    for row in rows[0]:
        ((start, end),) = row.spans
        assert end == len(row.input_ids)
        assert row.input_ids[:start] == words.apply_chat_template(
            row.prompt.messages, add_generation_prompt=True, return_dict=False
        )
    assert len(notes) == 1
    assert notes[0].startswith("1 chats became several rows")


def test_a_chat_is_cut_short_where_its_next_turn_does_not_fit(target: Path) -> None:
    notes: list[str] = []
    asked, words = chats(3), load_tokenizer(target)
    (first,) = tokenize(asked, words, "tiny", every_turn=True)
    ((row,),) = talk(target, asked, context=len(first.prompt_ids) + 8 + 30, note=notes.append)
    assert len(row.spans) < 3
    assert notes == [
        f"1 chats were cut short, as their next turn would not have fitted into {len(first.prompt_ids) + 38} tokens"
    ]
    assert len(talk(target, asked, context=longest_chat(first, 8, words))[0][0].spans) == 3


def test_chats_are_finished_one_after_the_other() -> None:
    """A later turn goes before the first turns of other chats, so that a kill loses few (here a scripted answerer)."""
    words, order = tiny.tokenizer(), []

    def answer(waiting: deque[Request], sampling: Sampling) -> Iterator[Completion]:
        while waiting:
            r = waiting.popleft()
            order.append((r.prompt.tags["i"], r.turn, r.key))
            yield Completion(
                r, [*words.encode("ok"), 2], "stop", np.zeros((3, 4), np.int32), np.zeros((3, 4), np.float32)
            )

    requests = tokenize(chats(2, 2), words, "tiny", every_turn=True)
    assert [len(rows) for rows in converse(requests, GREEDY, answer, words)] == [1, 1]
    assert [(i, turn) for i, turn, _ in order] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({key for *_, key in order}) == 4  # each draws from a seed of its own


def test_given_answers_are_spans_with_their_ending_token() -> None:
    """D13: plain ChatML, two turns, no generation tags: the share is neither 0 nor 1, and <|im_end|> is supervised."""
    words = tiny.tokenizer()
    one = prompt([user("Hi"), said("Hello, you"), user("Größe?"), said("12 cm"), user("left out")][:4])
    (text,) = given_texts(one, words, ENDINGS)
    assert [words.decode(text.input_ids[s:e]) for s, e in text.spans] == ["Hello, you<|im_end|>", "12 cm<|im_end|>"]
    assert (
        text.input_ids == words.apply_chat_template(one.messages, return_dict=False)[:-1]
    )  # less the newline after it
    assert text.supervised == len("Hello, you12 cm") + 2
    assert text.prompt.messages == one.messages[:3]
    assert 0 < text.supervised < len(text.input_ids)


def test_given_answers_in_a_template_that_rewrites_history() -> None:
    words = tiny.tokenizer()
    words.chat_template = FORGETFUL
    one = prompt([user("Hi"), said("Hello"), user("And?"), said("No")])
    first, second = given_texts(one, words, ENDINGS)
    assert (first.prompt.id, second.prompt.id) == (one.id, f"{one.id}.2")
    assert [words.decode(first.input_ids[s:e]) for s, e in first.spans] == ["Hello<|im_end|>"]
    assert [words.decode(second.input_ids[s:e]) for s, e in second.spans] == ["No<|im_end|>"]
    assert "<|im_start|>assistant\nH<|im_end|>" in words.decode(second.input_ids)


@pytest.mark.parametrize(
    ("template", "says"), [(THINKING, "where the answer begins"), (ENDLESS, "where the answer ends")]
)
def test_templates_that_hide_the_answer_are_refused(template: str, says: str) -> None:
    words = tiny.tokenizer()
    words.chat_template = template
    one = prompt([user("Hi"), said("Hello")])
    with pytest.raises(InputError, match=rf"prompt {one.id}: .*messages\[1\].* so {says} .*answers=every"):
        given_texts(one, words, ENDINGS)
