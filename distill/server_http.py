"""What goes over the line to a vLLM server that others run, and what comes back: the request, its answer, and what went wrong.

Prompts go as token ids and answers come back as token ids; log-probabilities are keyed `token_id:N`, so no text is ever
tokenised again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from distill.requests import Completion, Request
from pairing.errors import PartFailedError

CONNECT_S = 10.0
REST_S, LONGEST_REST_S = 0.5, 20.0  # a server rests this long after a failure, doubled each time


class Busy(Exception):
    """The server did not answer this time: a 5xx, a 429 (`full`), or an answer that broke off."""

    def __init__(self, said: str, rest_s: float | None = None, full: bool = False) -> None:
        super().__init__(said)
        self.rest_s, self.full = rest_s, full


class Refused(PartFailedError):
    """A status that no other try would change."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


@dataclass
class Server:
    url: str
    model: str = ""  # its name for the target, once it is checked
    up: bool = True  # as far as is known
    in_flight: int = 0
    failures: int = 0  # in a row, those of requests that were out together counted once
    rests_until: float = 0.0
    answered: int = 0
    tokens: int = 0
    retries: int = 0  # requests that went to another server, or came again
    last_error: str = ""
    failed: dict[str, str] = field(default_factory=dict)  # prompt of the set in work -> what went wrong with it here

    def fail(self, error: Exception) -> None:
        full = isinstance(error, Busy) and error.full
        self.up, self.retries = self.up and full, self.retries + 1
        self.last_error = str(error) if isinstance(error, Busy) else f"{type(error).__name__} {error}".strip()
        now = time.monotonic()
        if now < self.rests_until:
            return
        self.failures += 1
        rest = min(LONGEST_REST_S, REST_S * 2 ** min(self.failures - 1, 10)) * random.uniform(0.8, 1.2)
        asked = error.rest_s if isinstance(error, Busy) else None
        self.rests_until = now + (rest if asked is None else asked)


@dataclass
class Pool:
    """The servers of one target, and what every request to them shares."""

    servers: list[Server]
    target: str
    names: tuple[str, ...]  # what a server may call it: the user's name, or the folder that a serve line of ours names
    tokenizer: Any
    endings: list[int]
    served_model: str | None
    top_logprobs: int
    probes: list[Request]
    heads: list[dict[int, float]]  # after each probe: as recorded, or else of the first server that is checked
    heads_of: str | None  # that server; None where they are recorded
    per_server: int
    patience: float
    headers: dict[str, str]
    note: Callable[[str], None]
    context: int | None = None  # the shortest of the servers
    down_since: float | None = None  # when the last of them went down


def completion_of(request: Request, choice: dict[str, Any], k: int, url: str) -> Completion:
    """A Completion from a choice of /v1/completions. Raises PartFailedError where its ids or log-probs don't fit together,
    Busy where the answer was broken off.

    The server gives, at each position, the token it took and the K most likely, which are K + 1 entries where that token is
    none of them.
    """
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise Busy(f"an answer ended with finish_reason {reason!r}")
    ids, listed = choice.get("token_ids"), (choice.get("logprobs") or {}).get("top_logprobs")
    if choice.get("prompt_token_ids") not in (None, request.prompt_ids):
        raise PartFailedError(
            f"{url}: prompt {request.prompt.id} went out as {len(request.prompt_ids)} token ids and came back as others: "
            "something between here and the engine changes prompts; send to the vLLM server itself"
        )
    if not ids or not listed or len(ids) != len(listed):
        raise PartFailedError(
            f"{url}: prompt {request.prompt.id}: {len(ids or [])} token ids and log-probs for {len(listed or [])} positions: "
            "a vLLM server that knows return_token_ids and logprobs is needed (0.10 or newer)"
        )
    head_ids, head_logp = np.zeros((len(ids), k), np.int32), np.zeros((len(ids), k), np.float32)
    for n, (taken, entries) in enumerate(zip(ids, listed, strict=True)):
        try:
            found = {int(token.removeprefix("token_id:")): float(logp) for token, logp in entries.items()}
        except (ValueError, TypeError, AttributeError):
            raise PartFailedError(
                f"{url}: log-probs are not keyed by token id: a vLLM server that knows return_tokens_as_token_ids is needed"
            ) from None
        if len(found) == k + 1:
            found.pop(taken, None)
        if len(found) != k:
            raise PartFailedError(f"{url}: prompt {request.prompt.id}: {len(found)} log-probs at a position, not {k}")
        ranked = sorted(found.items(), key=lambda pair: -pair[1])  # stable: of equals the server's first stays first
        head_ids[n], head_logp[n] = [i for i, _ in ranked], [p for _, p in ranked]
    return Completion(request, list(ids), reason, head_ids, head_logp)


def require_own_end(done: Completion, max_tokens: int, endings: Sequence[int], url: str) -> None:
    """Raises PartFailedError where neither the target's own ending token nor max_tokens ended the answer, but the server."""
    if done.finish_reason == "length" and len(done.ids) < max_tokens:
        raise PartFailedError(
            f"{url}: prompt {done.request.prompt.id}: its answer was cut at {len(done.ids)} tokens where max_tokens={max_tokens} "
            "was asked: the server has a limit of its own; start it with --generation-config vllm and a larger --max-model-len"
        )
    if done.finish_reason == "stop" and done.ids[-1] not in endings:
        raise PartFailedError(
            f"{url}: prompt {done.request.prompt.id}: its answer ended with id {done.ids[-1]}, which is no ending token of the "
            f"target ({', '.join(map(str, endings))}): start the server with --generation-config vllm and the target's own files"
        )


def body_of(model: str, prompt_ids: Sequence[int], top_logprobs: int, endings: Sequence[int]) -> dict[str, Any]:
    """What every request says. All sampling is pinned, or the model's own generation config would change it (fault D23)."""
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "logprobs": top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stop_token_ids": list(endings),
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


async def post(http: httpx.AsyncClient, server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's JSON. Raises Busy for what may go well another time, PartFailedError for what will not."""
    response = await http.post(f"{server.url}{path}", json=body)
    if response.status_code == 429 or response.status_code >= 500:
        after = response.headers.get("retry-after", "")
        rest = min(LONGEST_REST_S, float(after)) if after.isdigit() else None
        raise Busy(f"{response.status_code}: {said_by(response)}", rest, full=response.status_code == 429)
    if response.status_code != 200:
        raise Refused(
            f"{server.url}{path}: refused ({response.status_code}: {said_by(response)})", response.status_code
        )
    return object_of(response, path)


async def require_health(http: httpx.AsyncClient, server: Server) -> None:
    response = await http.get(f"{server.url}/health", timeout=CONNECT_S)
    if response.status_code != 200:
        raise Busy(f"/health says {response.status_code}")


def object_of(response: httpx.Response, path: str) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:  # no JSON, or no UTF-8
        found = None
    if not isinstance(found, dict):
        raise Busy(f"{path}: an answer that is no JSON object")
    return found


def choice_of(found: dict[str, Any]) -> dict[str, Any]:
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Busy(f"an answer without choices: {str(found)[:200]}")
    return choices[0]


def said_by(response: httpx.Response) -> str:
    try:
        found = response.json()
        return str((found.get("error") or {}).get("message") or found)[:300]
    except (ValueError, AttributeError):
        return " ".join(response.text.split())[:300]
