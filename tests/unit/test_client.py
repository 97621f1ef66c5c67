"""What the client makes of a stream: times, tokens and arrivals, against a scripted server whose figures are known by hand.

The server is a stand-in (no engine runs here), on a real socket. Client and script share a clock that only the script moves,
so that times are exact on any machine.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eval import client, measure, statistics
from eval.measure import Arm, Request
from pairing.errors import PartFailedError

Script = list[tuple[float, list[int]]]  # (seconds since the request, token ids of the chunk)


class Clock:
    """Stands in for `time` in the client; `tell` sets it and returns once the client has looked at it."""

    def __init__(self) -> None:
        self.now, self.looks, self.changed = 100.0, 0, threading.Condition()

    def perf_counter(self) -> float:
        with self.changed:
            self.looks += 1
            self.changed.notify_all()
            return self.now

    def time(self) -> float:
        return 1_000.0

    def tell(self, seconds: float, send: Any) -> None:
        with self.changed:
            self.now, looks = 100.0 + seconds, self.looks
            send()
            assert self.changed.wait_for(lambda: self.looks > looks, 10)


class Scripted:
    """Streams `script` to every request as vLLM does; with `hold` it waits there for so many requests first. `instead` answers
    in its own way."""

    def __init__(
        self,
        script: Script,
        clock: Clock | None = None,
        hold: int = 1,
        usage: int | None = None,
        instead: Callable[[BaseHTTPRequestHandler], None] | None = None,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.barrier = threading.Barrier(hold)
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                scripted.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                if instead:
                    return instead(self)
                scripted.barrier.wait(10)
                self.send_response(200)
                self.end_headers()
                for i, (at, ids) in enumerate(script):
                    last = i == len(script) - 1
                    choice = {"text": "", "token_ids": ids, "finish_reason": "length" if last else None}
                    self.tell(at, {"choices": [choice]})
                count = sum(len(ids) for _, ids in script)
                self.tell(script[-1][0], {"choices": [], "usage": {"completion_tokens": usage or count}})
                self.wfile.write(b"data: [DONE]\n\n")

            def tell(self, at: float, event: dict[str, Any]) -> None:
                def send() -> None:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                    self.wfile.flush()

                clock.tell(at, send) if clock else send()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: Any) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(client, "time", one)
    return one


def test_ttft_tpot_itl_and_end_to_end_are_exact(clock: Clock) -> None:
    """D21: three chunks of 1, 4 and 2 tokens at 0.5, 1.3 and 1.5 s; chunks are counted by their tokens, not as tokens."""
    script: Script = [(0.5, [7]), (1.3, [8, 9, 10, 11]), (1.5, [12, 13])]
    with Scripted(script, clock) as server:
        (answer,) = client.complete(server.url, "target", [[1, 2, 3]], {"temperature": 0.0, "max_tokens": 7})
    assert server.bodies[0]["prompt"] == [1, 2, 3]
    row = measure._request_row(Arm("d", "draft_model"), Request("p", [1, 2, 3], 7, None), answer)
    assert row["output_ids"] == [7, 8, 9, 10, 11, 12, 13]
    assert row["ttft_s"] == pytest.approx(0.5)
    assert row["e2e_s"] == pytest.approx(1.5)
    assert row["tpot_s"] == pytest.approx(1.0 / 6)  # from first to last arrival, six tokens
    assert row["chunk_gap_s"] == pytest.approx([0.8, 0.2])
    assert row["itl_s"] == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.1, 0.1])
    assert (row["output_tokens"], row["chunks"], row["finish_reason"]) == (7, 3, "length")
    assert answer.started_at == pytest.approx(1_000.0 - 1.5 + 1.5)


def test_tokens_that_the_stream_lost_are_no_figure(clock: Clock) -> None:
    with Scripted([(0.5, [7]), (1.0, [8])], clock, usage=3) as server:
        (answer,) = client.complete(server.url, "target", [[1]], {"max_tokens": 3})
    with pytest.raises(PartFailedError, match="chunks hold 2 tokens, the server's usage says 3"):
        statistics.gaps(answer.arrivals, answer.output_tokens)


def test_requests_arrive_by_the_clock_whoever_is_still_being_answered() -> None:
    """The server answers nobody before all three are there: a closed loop of one would wait for ever."""
    with Scripted([(0.0, [7])], hold=3) as server:
        answers = client.complete(server.url, "t", [[0], [1], [2]], {"max_tokens": 1}, 30, 1, [0.0, 0.1, 0.2])
    assert [body["prompt"] for body in server.bodies] == [[0], [1], [2]]
    assert [a.started_at - answers[0].started_at for a in answers] == pytest.approx([0.0, 0.1, 0.2], abs=0.005)
    first, last = answers[0].arrivals[0][0], answers[2].arrivals[0][0]
    assert first == pytest.approx(last + 0.2, abs=0.1)  # the first one waited for the last


def test_a_client_that_is_late_does_not_make_the_server_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times count from when a request was due (coordinated omission), here 0.3 s before it was sent."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(max(0.0, seconds) + 0.3))
    with Scripted([(0.0, [7])]) as server:
        started = time.time()
        (answer,) = client.complete(server.url, "t", [[0]], {"max_tokens": 1}, 30, None, [0.0])
    assert 0.3 <= answer.arrivals[0][0] < time.time() - started


Answering = Callable[[BaseHTTPRequestHandler], None]
USAGE = {"choices": [], "usage": {"completion_tokens": 1}}


def chunk(finish: str | None, ids: list[int]) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": ids, "finish_reason": finish}]}


def says(*events: Any, status: int = 200) -> Answering:
    """Lines of a stream, as JSON or as they are; of another status its body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        for event in events:
            line = event if isinstance(event, bytes) else json.dumps(event).encode()
            handler.wfile.write(b"data: " + line + b"\n\n" if status == 200 else line)

    return answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (says({"message": "too long"}, status=400), r"refused a request \(400: .*too long"),
        (says({"message": "EngineDead"}, status=500), r"refused a request \(500: .*EngineDead"),
        (says(chunk(None, [7]), {"error": {"message": "EngineCore died"}}), r"broke off \(.*EngineCore died"),
        (says(chunk(None, [7]), USAGE), "ended without a finish reason or usage"),
        (says(chunk("length", [7])), "ended without a finish reason or usage"),
        (says(), "ended without a finish reason or usage"),
        (says(chunk("length", []), USAGE), r"holds no token ids \(usage says 1 tokens\)"),
        (says(chunk(None, [7]), b'{"choices": ['), "no completion .JSONDecodeError"),
        (says({"object": "text_completion"}), "no completion .KeyError: 'choices'"),
        (says([1]), "no completion .TypeError"),
        (says({"choices": [], "usage": {"completion_tokens": None}}), "no completion .TypeError"),
        (lambda handler: None, "broke off .RemoteProtocolError"),
    ],
)
def test_an_answer_that_is_none_is_a_part_that_failed(answer: Answering, why: str) -> None:
    """And so voids a cell with its reason: anything else would end the whole run."""
    with Scripted([], instead=answer) as server, pytest.raises(PartFailedError, match=why) as e:
        client.complete(server.url, "t", [[1], [2]], {"max_tokens": 1})
    assert server.url in str(e.value)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"choices": []}', b'{"choices": [{"prompt_logprobs": [null]}]}'])
def test_log_probs_that_are_none_are_a_part_that_failed(body: bytes) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    with Scripted([], instead=answer) as server, pytest.raises(PartFailedError, match="no completion"):
        client.prompt_log_probs(server.url, "t", [[1, 2]], 4)


@pytest.mark.parametrize("gap", [0.1, 60.0])
def test_a_server_that_hangs_or_trickles_does_not_hold_a_cell_for_ever(gap: float) -> None:
    """Whatever comes in between: the whole answer has its time, of which each byte's gap is a part only."""
    done = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        ends = time.monotonic() + 20  # or a client without a limit would hold the tests for ever
        while not done.wait(min(gap, 20)) and time.monotonic() < ends:
            handler.wfile.write(f"data: {json.dumps(chunk(None, [7]))}\n\n".encode())
            handler.wfile.flush()

    began = time.monotonic()
    try:
        with Scripted([], instead=answer) as server:
            with pytest.raises(PartFailedError, match=r"the server did not answer within 0.5 s$"):
                client.complete(server.url, "t", [[1]], {"max_tokens": 1}, 0.5)
            with pytest.raises(PartFailedError, match=r"the server did not answer within 0.5 s$"):
                client.prompt_log_probs(server.url, "t", [[1]], 1, 0.5)
    finally:
        done.set()
    assert time.monotonic() - began < 30
