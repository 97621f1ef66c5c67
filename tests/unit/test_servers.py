"""Servers elsewhere, against scripted ones (tests/fake_server.py): what is lost when they fail, and what is refused."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distill.in_servers as module
import distill.server_http
from distill.answers import open_answers
from distill.generate import Job, generate, new_job, recorded_heads, unanswered
from distill.in_servers import open_servers
from distill.prompts import prompt
from distill.requests import Request, Sampling, request_seed, tokenize
from distill.server_http import completion_of
from pairing.errors import InputError, PartFailedError
from pairing.pair import describe_model
from pairing.source import ModelSource, load_tokenizer, resolve
from recipes.generate import main
from tests import tiny
from tests.fake_server import FakeServer, Fault, real, reply, said, slow

K, COUNT = 6, 40
Handler = BaseHTTPRequestHandler
Body = dict[str, Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeServer]]:
    monkeypatch.setattr(distill.server_http, "REST_S", 0.05)
    monkeypatch.setattr(distill.server_http, "LONGEST_REST_S", 0.2)
    servers: list[FakeServer] = []

    def start(fault: Fault | None = None, **kwargs: Any) -> FakeServer:
        servers.append(FakeServer(fault, **kwargs))
        return servers[-1]

    yield start
    for one in servers:
        one.stop()


def job(target: Path, out: Path, count: int = COUNT, temperature: float = 0.0, skip_failed: int = 0) -> Job:
    words = load_tokenizer(target)
    asked = [prompt([{"role": "user", "content": f"{i} " + "word " * (i % 5)}]) for i in range(count)]
    described = describe_model(resolve(str(target)))
    return new_job("a", out, tokenize(asked, words, "tiny"), Sampling(6, temperature, K, 0), target=described,
                   rows=tiny.ROWS, backend="servers", prompts_source="texts", skip_failed=skip_failed)  # fmt: skip


def answered(target: Path, one: Job, *servers: FakeServer | str, **kwargs: Any) -> dict[str, Any]:
    """Runs the job on these servers and returns the counts per server."""
    urls = [s if isinstance(s, str) else s.url for s in servers]
    more: dict[str, Any] = {"per_server": 4, "patience": 5, "served_model": None, **kwargs}
    todo = unanswered(one)
    more["probes"] = [r for r in one.requests[:2] if isinstance(r, Request)]
    more["recorded"] = recorded_heads([one])
    with open_servers(urls, resolve(str(target)), load_tokenizer(target), top_logprobs=K, **more) as opened:
        generate(one, todo, opened[0])
        return opened[2]()


def rows_of(one: Job) -> list[dict[str, Any]]:
    return list(open_answers(one.folder).data)


def expected(one: Job) -> dict[str, tuple[list[int], list[dict[int, float]]]]:
    """What any of the scripted servers says, worked out here."""
    found = {}
    for r in one.requests:
        assert isinstance(r, Request)
        seed = request_seed(0, r.key) if one.sampling.temperature else None
        body = {
            "max_tokens": 6,
            "temperature": one.sampling.temperature,
            "logprobs": K,
            "stop_token_ids": [2],
            "seed": seed,
        }
        found[r.prompt.id] = said(r.prompt_ids, body, 0)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_what_the_servers_said(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], temperature: float
) -> None:
    """Ids, ends and heads, whether the token taken is in the head or not; nothing depends on who answered when."""
    one, other = (
        job(target, tmp_path / "a", temperature=temperature),
        job(target, tmp_path / "b", temperature=temperature),
    )
    a, b, c = serve(), serve(slow(0.01)), serve()
    counts = answered(target, one, a, b)
    answered(target, other, c)
    assert rows_of(one) == rows_of(other)
    assert sum(s["answered"] for s in counts.values()) == COUNT
    assert all(s["answered"] > 5 and s["retries"] == 0 for s in counts.values())
    assert a.most_at_once <= 4
    outside, right = 0, expected(one)
    for row in rows_of(one):
        ids, listed = right[row["id"]]
        start, end = row["spans"]
        assert row["input_ids"][start:end] == ids
        assert row["finish_reason"] == ("stop" if ids[-1] == 2 else "length")
        for n, entries in enumerate(listed):
            top = sorted(entries.items(), key=lambda pair: -pair[1])[:K]
            assert row["head_ids"][n * K : (n + 1) * K] == [i for i, _ in top]
            np.testing.assert_allclose(row["head_logprobs"][n * K : (n + 1) * K], [p for _, p in top], rtol=1e-3)
            outside += len(entries) > K
    assert (outside > 5) == (temperature > 0)


def dies(after: int) -> Fault:
    def fault(server: FakeServer, body: Body, handler: Handler) -> bool:
        if not real(body) or len(server.asked) < after:
            return False
        server.die(handler)
        return True

    return fault


def test_a_server_that_dies_in_the_middle_loses_nothing(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one, whole = job(target, tmp_path / "a"), job(target, tmp_path / "b")
    dead, alive = serve(dies(15)), serve(slow(0.02))
    counts = answered(target, one, dead, alive)
    assert counts[dead.url]["retries"] >= 1
    assert counts[dead.url]["answered"] < 20
    assert sum(s["answered"] for s in counts.values()) == COUNT
    answered(target, whole, serve())
    assert rows_of(one) == rows_of(whole)


def test_a_dead_server_is_tried_again(target: Path, tmp_path: Path, serve: Callable[..., FakeServer]) -> None:
    """Down at first: the others begin. It comes back in the middle and works along, once it is checked."""
    late = serve()
    late.stop()
    started: list[float] = []

    def wakes(server: FakeServer, body: Body, handler: Handler) -> bool:
        if len(server.asked) == 20:
            late.start()
            started.append(time.monotonic())
        return slow(0.05)(server, body, handler)

    notes: list[str] = []
    counts = answered(target, job(target, tmp_path / "a", 120), late, serve(wakes), note=notes.append)
    assert started
    assert counts[late.url]["answered"] > 5
    assert notes
    assert notes[0].startswith(f"{late.url} does not answer (ConnectError")


def comes_back(after: int, change: Callable[[FakeServer], None]) -> Fault:
    """It dies once, at its answer number `after`, and a moment later something else listens there."""
    answers = itertools.count()

    def fault(server: FakeServer, body: Body, handler: Handler) -> bool:
        if not real(body) or next(answers) != after:
            return False

        def again() -> None:
            change(server)
            server.start()

        server.die(handler)
        threading.Timer(0.3, again).start()
        return True

    return fault


def other_weights(server: FakeServer) -> None:
    server.weights = 1


def other_tokenizer(server: FakeServer) -> None:
    server.words = tiny.tokenizer(swap=(60, 61))


def test_a_server_that_comes_back_as_another_is_refused(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    """Alone, by what it said itself before; beside another, by that one. As it was it goes on. Nothing of the other is kept."""
    whole = job(target, tmp_path / "whole")
    answered(target, whole, serve())
    right = {row["id"]: row for row in rows_of(whole)}
    cases: list[tuple[Callable[[FakeServer], None], bool, str]] = [
        (other_weights, False, r"went down and came back with other weights: .* apart \(total variation\)"),
        (other_weights, True, r" apart \(total variation\): they hold different weights|came back with other weights"),
        (other_tokenizer, False, "has another tokenizer than"),
    ]
    for n, (change, beside, says) in enumerate(cases):
        one = job(target, tmp_path / str(n))
        servers = [serve(comes_back(9, change)), *([serve(slow(0.05))] if beside else [])]
        with pytest.raises(InputError, match=says) as e:
            answered(target, one, *servers, per_server=1)
        assert "\n" not in str(e.value)
        left = len(unanswered(one))
        assert 0 < left <= COUNT - 9
        counts = answered(target, one, serve())  # one that is as the first was goes on from there
        assert sum(s["answered"] for s in counts.values()) == left
        assert {row["id"]: row for row in rows_of(one)} == right
    same = job(target, tmp_path / "same")
    counts = answered(target, same, serve(comes_back(9, lambda server: None)), per_server=1)
    assert [s["answered"] for s in counts.values()] == [COUNT]
    assert {row["id"]: row for row in rows_of(same)} == right


def test_a_run_is_not_gone_on_with_by_other_weights(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one = job(target, tmp_path / "a", temperature=1.0)
    with pytest.raises(PartFailedError, match="no server has answered"):
        answered(target, one, serve(dies(25)), patience=0.3)
    left = len(unanswered(one))
    assert 0 < left < COUNT
    for urls in ([serve(weights=1)], [serve(), serve(weights=1)]):
        with pytest.raises(InputError, match=r"recorded already give distributions .* it holds other weights") as e:
            answered(target, one, *urls)
        assert "\n" not in str(e.value)
        assert len(unanswered(one)) == left
    answered(target, one, serve())
    whole = job(target, tmp_path / "b", temperature=1.0)
    answered(target, whole, serve())
    assert rows_of(one) == rows_of(whole)


def test_what_is_probed_is_least_certain_and_as_the_server_says(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one = job(target, tmp_path / "a", 20)
    answered(target, one, serve())
    right = expected(one)
    tops = sorted(max(right[r.prompt.id][1][0].values()) for r in one.requests)
    found = recorded_heads([one], 4)
    np.testing.assert_allclose(sorted(np.log(max(head.values())) for _, head in found), tops[:4], atol=2e-3)
    for request, head in found:
        ids = next(r.prompt_ids for r in one.requests if isinstance(r, Request) and r.prompt.id == request.prompt.id)
        assert request.prompt_ids == ids
        said_ = right[request.prompt.id][1][0]
        assert set(head) <= set(said_)
        np.testing.assert_allclose([head[i] for i in head], [np.exp(said_[i]) for i in head], rtol=5e-3)


def test_all_dead_ends_it_and_the_next_run_goes_on(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one = job(target, tmp_path / "a")
    dead = serve(dies(25))
    began = time.monotonic()
    with pytest.raises(PartFailedError, match=r"no server has answered for 1 s \(http.*finished prompts are kept"):
        answered(target, one, dead, patience=0.6)
    assert time.monotonic() - began < 8
    left = len(unanswered(one))
    assert 15 <= COUNT - left < COUNT
    second = serve()
    counts = answered(target, one, second)
    assert counts[second.url]["answered"] == left  # nothing is asked twice
    whole = job(target, tmp_path / "b")
    answered(target, whole, serve())
    assert rows_of(one) == rows_of(whole)


def test_errors_that_pass_are_retried(target: Path, tmp_path: Path, serve: Callable[..., FakeServer]) -> None:
    """Every third request fails once: 500, 503 without JSON, 429 with a time, an answer that was aborted."""

    numbers = itertools.count()

    def flaky(server: FakeServer, body: Body, handler: Handler) -> bool:
        if not real(body) or (n := next(numbers)) % 3:
            return False
        if n % 4 == 0:
            reply(handler, 500, {"error": {"message": "EngineCore encountered an issue"}})
        elif n % 4 == 1:
            reply(handler, 503, b"upstream down")
        elif n % 4 == 2:
            reply(handler, 429, {"error": "full"}, retry_after="0")
        else:
            aborted = server.answer(body)
            aborted["choices"][0]["finish_reason"] = "abort"
            reply(handler, 200, aborted)
        return True

    one = job(target, tmp_path / "a")
    server = serve(flaky)
    counts = answered(target, one, server)[server.url]
    assert counts["answered"] == COUNT
    assert counts["retries"] >= 10
    assert counts["last_error"]
    whole = job(target, tmp_path / "b")
    answered(target, whole, serve())
    assert rows_of(one) == rows_of(whole)


def test_one_poisonous_prompt_does_not_turn_for_ever(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one = job(target, tmp_path / "a")
    bad = one.requests[7]
    assert isinstance(bad, Request)

    def chokes(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body) and body["prompt"] == bad.prompt_ids:
            reply(handler, 500, {"error": {"message": "cannot"}})
            return True
        return False

    says = rf"prompt {bad.prompt.id} failed 6 times, the last with 500: cannot.*skip_failed=1"
    with pytest.raises(PartFailedError, match=says):
        answered(target, one, serve(chokes), serve(chokes))
    left = len(unanswered(one))
    assert left < COUNT
    with pytest.raises(PartFailedError, match=rf"prompt {bad.prompt.id} failed 6 times"):  # every later run too
        answered(target, one, serve(chokes))
    without = replace(one, skip_failed=1)
    counts = answered(target, without, server := serve(chokes))
    meta = open_answers(one.folder).meta
    assert [kept["id"] for kept in meta["stats"]["left_out"]] == [bad.prompt.id]
    assert "500: cannot" in meta["stats"]["left_out"][0]["reason"]
    assert counts[server.url]["failed"] == {bad.prompt.id: "500: cannot"}
    assert {row["id"] for row in rows_of(one)} == {r.prompt.id for r in one.requests} - {bad.prompt.id}
    assert unanswered(without) == []  # the same command has nothing to do
    assert unanswered(one) == [bad]  # that one is asked again where it may no longer be left out
    answered(target, one, serve())
    assert len(rows_of(one)) == COUNT
    assert "left_out" not in open_answers(one.folder).meta["stats"]


def test_more_than_may_be_left_out_ends_it(target: Path, tmp_path: Path, serve: Callable[..., FakeServer]) -> None:
    """A refusal is of the prompt too, and is not tried twice; what is of all (401) ends it whatever may be left out."""
    bad = [r.prompt_ids for r in job(target, tmp_path / "x").requests[5:8] if isinstance(r, Request)]

    def refuses(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body) and body["prompt"] in bad:
            reply(handler, 400, {"error": {"message": "too long"}})
        return real(body) and body["prompt"] in bad

    two, three, none = (job(target, tmp_path / str(n), skip_failed=n) for n in (2, 3, 40))
    says = r"prompt \w+: .*refused \(400: too long\).*leave such prompts out: skip_failed=3"
    with pytest.raises(PartFailedError, match=says):
        answered(target, two, serve(refuses))
    answered(target, three, server := serve(refuses))
    assert sum(asked in bad for asked in server.asked) == 3
    assert len(rows_of(three)) == COUNT - 3
    assert len(open_answers(three.folder).meta["stats"]["left_out"]) == 3
    bad += [r.prompt_ids for r in none.requests if isinstance(r, Request)]
    with pytest.raises(PartFailedError, match=r"none of 40 prompts was answered: .*too long"):
        answered(target, none, serve(refuses))

    def stranger(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body):
            reply(handler, 401, {"error": {"message": "who?"}})
        return real(body)

    with pytest.raises(PartFailedError, match=r"refused \(401: who\?\)$"):
        answered(target, job(target, tmp_path / "s", skip_failed=COUNT), serve(stranger))


def test_a_prompt_that_no_probe_survives_is_named(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one = job(target, tmp_path / "a")
    first = one.requests[0]

    def chokes(server: FakeServer, body: Body, handler: Handler) -> bool:
        if isinstance(first, Request) and body["prompt"] == first.prompt_ids:
            reply(handler, 500, {"error": {"message": "cannot"}})
            return True
        return False

    with pytest.raises(PartFailedError, match=rf"no server answers \(.*prompt {first.prompt.id}: 500: cannot"):
        answered(target, one, serve(chokes), patience=0.2)


def test_a_refusal_is_one_line_and_no_retry(target: Path, tmp_path: Path, serve: Callable[..., FakeServer]) -> None:
    def refuses(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body) and len(server.asked) > 20:
            reply(handler, 400, {"error": {"message": "The decoder prompt is longer than the maximum"}})
            return True
        return False

    one = job(target, tmp_path / "a")
    server = serve(refuses)
    with pytest.raises(PartFailedError, match=r"/v1/completions: refused \(400: The decoder prompt is longer") as e:
        answered(target, one, server)
    assert "\n" not in str(e.value)
    assert len(server.asked) <= 20 + 2 * 4  # those in flight
    assert 0 < len(unanswered(one)) < COUNT


def changed(**parts: Any) -> Fault:
    def fault(server: FakeServer, body: Body, handler: Handler) -> bool:
        answer = server.answer(body)
        answer["choices"][0] |= parts
        reply(handler, 200, answer)
        return True

    return fault


def test_wrong_servers_are_refused_before_any_work(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    one = job(target, tmp_path / "a")
    swapped, more, processed = serve(), serve(max_logprobs=5), serve()
    order = tiny.tokenizer().get_vocab()
    swapped.words = tiny.tokenizer(swap=(order["e"], order["f"]))
    processed.processed = True
    other_ids = serve()
    # the same segmentation of the probe's text, but two ids that it does not hold are exchanged
    other_ids.words = tiny.tokenizer(swap=(order["Q"], order["Z"]))
    keyed = changed(logprobs={"top_logprobs": [{"the": -1.0}]})
    cases: list[tuple[list[FakeServer], dict[str, Any], type[Exception], str]] = [
        ([serve(root="other")], {}, InputError, r"serves served \(from /models/other\), not .*tiny: .*served_model="),
        (
            [serve()],
            {"served_model": "mine"},
            InputError,
            r"serves no model 'mine': it serves served \(from /models/tiny\)",
        ),
        ([swapped], {}, InputError, r"another tokenizer than .*\(it segments a text otherwise\)"),
        ([other_ids], {}, InputError, r"another tokenizer than .*\(its ids 0 to 258 are other texts\)"),
        ([more], {}, InputError, r"gives fewer than top_logprobs=6 log-probs: start it with --max-logprobs 6"),
        (
            [processed],
            {},
            InputError,
            r"not those of the untouched distribution: start it with --logprobs-mode raw_logpro",
        ),
        ([serve(), serve(weights=1)], {}, InputError, r"apart \(total variation\): they hold different weights"),
        ([serve(changed(prompt_token_ids=[1, 2]))], {}, PartFailedError, r"came back as others: something between"),
        ([serve(changed(token_ids=None))], {}, PartFailedError, r"0 token ids and log-probs for 1 positions"),
        ([serve(keyed)], {}, PartFailedError, r"not keyed by token id"),
    ]
    for servers, more_, error, says in cases:
        with pytest.raises(error, match=says) as e:
            answered(target, one, *servers, **more_)
        assert "\n" not in str(e.value)
        assert len(unanswered(one)) == COUNT
    answered(target, one, serve(root="other"), served_model="served")  # by its name there
    with pytest.raises(PartFailedError, match=r"no server answers \(http://127.0.0.1:9: ConnectError"):
        answered(target, job(target, tmp_path / "b"), "http://127.0.0.1:9", patience=0.3)


def other_end(**parts: Any) -> Fault:
    """An answer of a server that ends answers by a rule of its own."""

    def fault(server: FakeServer, body: Body, handler: Handler) -> bool:
        if not real(body):
            return False
        answer = server.answer(body | {"max_tokens": 3, "stop_token_ids": []})
        answer["choices"][0] |= parts
        reply(handler, 200, answer)
        return True

    return fault


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("length", r"was cut at 3 tokens where max_tokens=6 .*--generation-config vllm"),
        ("stop", r"ended with id \d+, which is no ending token of the target \(2\): .*--generation-config vllm"),
    ],
)
def test_a_server_that_ends_answers_by_its_own_rule(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], reason: str, says: str
) -> None:
    one = job(target, tmp_path / "a")
    with pytest.raises(PartFailedError, match=says) as e:
        answered(target, one, serve(other_end(finish_reason=reason)))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("said_", [b"<html>", b"[]", b"\xff", b"{}", b'{"choices": []}', b'{"choices": [null]}'])
def test_answers_that_are_none_end_it_in_one_line(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], said_: bytes
) -> None:
    def strange(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body):
            reply(handler, 200, said_)
        return real(body)

    with pytest.raises(PartFailedError, match=r"failed 6 times, the last with .*(no JSON object|without choices)"):
        answered(target, job(target, tmp_path / "a", 1), serve(strange))


def test_a_web_server_is_no_model_server(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fake_server.reply", lambda handler, status, _: reply(handler, status, b"<html>"))
    with pytest.raises(PartFailedError, match=r"no server answers \(.*/v1/models: an answer that is no JSON object"):
        answered(target, job(target, tmp_path / "a"), serve(), patience=0.2)


def test_an_answer_that_never_comes_does_not_turn_for_ever(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is healthy all the while, so patience never ends it."""
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    monkeypatch.setattr(module, "MOST_ERRORS", 3)
    one = job(target, tmp_path / "a")
    bad = one.requests[7]
    assert isinstance(bad, Request)

    def hangs(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body) and body["prompt"] == bad.prompt_ids:
            time.sleep(0.5)
        return len(server.asked) > 300  # were it to turn for ever, it ends here

    with pytest.raises(PartFailedError, match=rf"prompt {bad.prompt.id} failed 3 times, the last with ReadTimeout"):
        answered(target, one, serve(hangs))


def test_no_log_prob_is_a_line(target: Path) -> None:
    choice = {"finish_reason": "stop", "token_ids": [5], "logprobs": {"top_logprobs": [{"token_id:5": None}]}}
    with pytest.raises(PartFailedError, match="log-probs are not keyed by token id"):
        completion_of(Request(prompt([{"role": "user", "content": "x"}]), [1]), choice, 1, "http://s")


def test_a_position_with_too_few_log_probs() -> None:
    choice = {"finish_reason": "stop", "token_ids": [5], "logprobs": {"top_logprobs": [{"token_id:5": -0.1}]}}
    request = Request(prompt([{"role": "user", "content": "x"}]), [1])
    with pytest.raises(PartFailedError, match="1 log-probs at a position, not 3"):
        completion_of(request, choice, 3, "http://s")


def test_a_target_that_is_served_as_a_folder_made_of_it(
    tmp_path: Path, serve: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an adapter or a GGUF file our own line serves the folder in a cache, by its digest: that name is the target's too."""
    folder = tiny.folder(tmp_path / "merged" / "0123abcd")
    monkeypatch.setattr("pairing.source.ADAPTER_CACHE", folder.parent)
    source = ModelSource("me/my-adapter", folder, None, None)
    keys: dict[str, Any] = {"served_model": None, "top_logprobs": K, "probes": []}
    for root in ("0123abcd", "my-adapter"):
        with open_servers([serve(root=root).url], source, load_tokenizer(folder), **keys) as (_, context, _):
            assert context == 512
    with (
        pytest.raises(InputError, match=r"serves served \(from /models/tiny\), not me/my-adapter"),
        open_servers([serve().url], source, load_tokenizer(folder), **keys),
    ):
        pass


def test_the_command_leaves_out_what_no_server_answers(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word it ends there, each time; with skip_failed it goes on from what is finished, and says which and why."""
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"c {i}"}) + "\n" for i in range(9)))
    bad = prompt([{"role": "user", "content": "c 5"}])
    (request,) = tokenize([bad], load_tokenizer(target), "tiny")

    def chokes(server: FakeServer, body: Body, handler: Handler) -> bool:
        if real(body) and body["prompt"] == request.prompt_ids:
            reply(handler, 500, {"error": {"message": "cannot"}})
        return real(body) and body["prompt"] == request.prompt_ids

    argv = [f"target={target}", f"out={tmp_path / 'o'}", "top_logprobs=6", f"sets.x.prompts={file}", "sets.x.max_tokens=4",
            f"servers=[{serve(chokes).url}]", "--json"]  # fmt: skip
    with pytest.raises(PartFailedError, match=f"prompt {bad.id} failed 6 times"):
        main(argv)
    assert main([*argv, "skip_failed=2"]) == 0
    out, err = capsys.readouterr()
    (left,) = json.loads(out)["sets"]["x"]["left_out"]
    assert left["id"] == bad.id
    assert f"set x is without prompt {bad.id}: " in err
    assert "500: cannot" in left["reason"]
    assert len(open_answers(tmp_path / "o" / "x").data) == 8
    assert main([*argv, "skip_failed=2"]) == 0
    assert f"set x is without prompt {bad.id}: " in capsys.readouterr().err


def test_the_command_refuses_to_go_on_with_other_weights(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    """Where the set that they began is whole, and the next one is not, too."""
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"c {i}"}) + "\n" for i in range(9)))
    argv = [f"target={target}", f"out={tmp_path / 'o'}", "top_logprobs=6", "patience=0.3"]
    argv += [f"sets.{name}.{key}" for name in "xy" for key in (f"prompts={file}", f"max_tokens={4 + (name == 'y')}")]

    def dies_at_y(server: FakeServer, body: Body, handler: Handler) -> bool:
        if body["max_tokens"] == 5:
            server.die(handler)
        return bool(body["max_tokens"] == 5)

    with pytest.raises(PartFailedError, match="no server has answered"):
        main([*argv, f"servers=[{serve(dies_at_y).url}]"])
    with pytest.raises(InputError, match="it holds other weights than the servers that began"):
        main([*argv, f"servers=[{serve(weights=1).url}]"])
    assert main([*argv, f"servers=[{serve().url}]"]) == 0


def test_the_command_with_servers(
    target: Path, tmp_path: Path, serve: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two turns; what a kill left is gone on with; counts per server at the end; longer than a server's context is refused."""
    file = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    file.write_text(
        "".join(json.dumps({"messages": [*turns[:2], turns[2] | {"content": f"c {i}"}]}) + "\n" for i in range(9))
    )
    a, b = serve(), serve()
    argv = [f"target={target}", f"out={tmp_path / 'o'}", "top_logprobs=6", f"sets.x.prompts={file}", "sets.x.max_tokens=5",
            f"servers=[{a.url}, {b.url}/]"]  # fmt: skip
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    x = json.loads(out)["sets"]["x"]
    assert x["answers"] == 18
    assert x["servers"].keys() == {a.url, b.url}
    assert sum(one["answered"] for one in x["servers"].values()) == 18
    assert all((one["retries"], one["last_error"]) == (0, None) for one in x["servers"].values())
    assert err.count(" tokens, 0 retries") == 2
    found = open_answers(tmp_path / "o" / "x")
    assert found.meta["backend"] == "servers"
    assert found.meta["stats"]["servers"] == x["servers"]
    assert main([*argv, "--json"]) == 0
    assert main([*argv, f"servers=[{a.url}]", "per_server=2"]) == 0  # other servers may finish what these began
    assert open_answers(tmp_path / "o" / "x").meta["stats"]["servers"] == x["servers"]  # which had nothing to do
    first = iter([True])

    def tired(server: FakeServer, body: Body, handler: Handler) -> bool:
        if not real(body) or not next(first, False):
            return False
        reply(handler, 500, {"error": {"message": "tired"}})
        return True

    capsys.readouterr()
    words = [*argv[:1], f"out={tmp_path / 'two'}", *argv[2:5], f"sets.y.prompts={file}", "sets.y.limit=4"]
    assert main([*words, "sets.y.max_tokens=4", f"servers=[{serve(tired).url}]", "--json"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    counts = {name: next(iter(one["servers"].values())) for name, one in sets.items()}
    assert (counts["x"]["answered"], counts["y"]["answered"]) == (18, 8)  # each set has its own
    assert (counts["x"]["retries"], counts["y"]["retries"]) == (1, 0)
    assert counts["x"]["last_error"] == "500: tired"
    assert list(counts["x"]["failed"].values()) == ["500: tired"]
    assert counts["y"]["failed"] == {}
    for words, says in (
        ([f"servers=[{a.url}/v1]"], "a server is http://host:port, without a path"),
        (["servers=['http://h:8000?key=1']"], "a server is http://host:port, without a path"),
        (["servers=['http://me:secret@h:8000']"], "no user and password: give the key in VLLM_API_KEY"),
        (["sets.x.max_tokens=600"], "context of 512"),
    ):
        with pytest.raises(InputError, match=says) as e:
            main([*argv[:1], f"out={tmp_path / 'q'}", *argv[2:], *words])
        assert "secret" not in str(e.value)
