"""A scripted stand-in for a vLLM server (no engine runs here), with the faults that real ones have now and then.

It speaks the part of the protocol that distill/server_http.py uses. What it answers is a pure function of prompt and seed, so any
number of them are one model; tests/integration/test_servers.py does the same with real vLLM.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tests import tiny

Fault = Callable[["FakeServer", dict[str, Any], BaseHTTPRequestHandler], bool]


def distribution(prompt: list[int], weights: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The next token's, over all rows, after these ids."""
    rng = np.random.default_rng([weights, *prompt[-8:], len(prompt)])
    return rng.dirichlet(np.full(tiny.ROWS, 0.05))


def said(prompt: list[int], body: dict[str, Any], weights: int) -> tuple[list[int], list[dict[int, float]]]:
    """Ids and their log-probs as vLLM lists them: the token that was taken first, then the K most likely."""
    rng, ids, listed = random.Random(f"{body.get('seed')} {prompt}"), list(prompt), []
    while len(ids) - len(prompt) < body["max_tokens"]:
        p = distribution(ids, weights)
        drawn = rng.choices(range(tiny.ROWS), (p ** (1 / (body["temperature"] or 1))).tolist())[0]
        taken = drawn if body["temperature"] else int(p.argmax())
        top = np.argsort(-p, kind="stable")[: body["logprobs"]].tolist()
        listed.append({i: float(np.log(max(p[i], 1e-30))) for i in [taken, *top]})
        ids.append(taken)
        if taken in body["stop_token_ids"]:
            break
    return ids[len(prompt) :], listed


class FakeServer:
    """`fault(server, body, handler)` may answer a completion itself (True), or do something and let it be answered."""

    def __init__(
        self, fault: Fault | None = None, *, weights: int = 0, root: str = "tiny", max_logprobs: int = 20
    ) -> None:
        self.fault, self.weights, self.root, self.max_logprobs = fault, weights, root, max_logprobs
        self.words = tiny.tokenizer()
        self.asked: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.processed = False  # log-probs after temperature, as --logprobs-mode processed_logprobs gives them
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet: two would wait 40 ms for each other
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                reply(self, 200, {"data": [{"id": "served", "root": f"/models/{fake.root}", "max_model_len": 512}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.post(self, body)

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up are part of it
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more; connections that are open stay as they are."""
        self.http.shutdown()
        self.http.server_close()

    def die(self, handler: BaseHTTPRequestHandler) -> None:
        """In the middle of an answer; and nobody listens from then on."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
        handler.wfile.flush()
        handler.close_connection = True
        self.http.socket.close()
        handler.connection.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self.stop, daemon=True).start()

    def post(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/tokenize":
            return reply(handler, 200, {"tokens": self.words.encode(body["prompt"], add_special_tokens=False)})
        if handler.path == "/detokenize":
            return reply(handler, 200, {"prompt": self.words.decode(body["tokens"])})
        if body["logprobs"] > self.max_logprobs:
            said_ = f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: {self.max_logprobs}"
            return reply(handler, 400, {"error": {"message": said_}})
        with self.lock:
            self.asked.append(body["prompt"])
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.fault is None or not self.fault(self, body, handler):
                reply(handler, 200, self.answer(body))
        finally:
            with self.lock:
                self.at_once -= 1

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, listed = said(body["prompt"], body, self.weights)
        if self.processed and body["temperature"]:
            listed = [{i: p / body["temperature"] for i, p in position.items()} for position in listed]
        keyed = [{f"token_id:{i}": p for i, p in position.items()} for position in listed]
        reason = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        choice = {"token_ids": ids, "finish_reason": reason, "prompt_token_ids": body["prompt"]}
        return {"choices": [choice | {"logprobs": {"top_logprobs": keyed}}]}


def reply(handler: BaseHTTPRequestHandler, status: int, value: Any, **headers: str) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(data)))
    for key, text in headers.items():
        handler.send_header(key.replace("_", "-"), text)
    handler.end_headers()
    handler.wfile.write(data)


def real(body: dict[str, Any]) -> bool:
    """Whether it is work, not a probe."""
    return bool(body["max_tokens"] > 1)


def slow(seconds: float) -> Fault:
    def fault(server: FakeServer, body: dict[str, Any], handler: BaseHTTPRequestHandler) -> bool:
        time.sleep(seconds if real(body) else 0)
        return False

    return fault
