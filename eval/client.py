"""Talks to one vLLM server on loopback: health, counters, and streamed completions with a time on every chunk.

The only module that does. Prompts go as token ids, so that every arm reads the very same prompt, and answers come back
as token ids, so that they can be compared exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from pairing.errors import PartFailedError

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    output_ids: list[int]
    arrivals: list[tuple[float, int]]  # (seconds since the request was sent, tokens in the chunk)
    output_tokens: int  # the server's own count (usage)
    finish_reason: str
    started_at: float  # seconds since the epoch


def health(url: str) -> int | None:
    """The status of /health: 200 where requests are answered, 503 where the engine behind is gone; None while nobody
    listens."""
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def metrics(url: str) -> str:
    """The text of /metrics; eval/counters.py reads it."""
    try:
        return httpx.get(f"{url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    except httpx.HTTPError as e:
        raise PartFailedError(f"{url}/metrics: {type(e).__name__}: {e}") from e


def complete(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    sampling: dict[str, Any],
    timeout_s: float = 600,
    in_flight: int | None = None,
    arrivals: Sequence[float] | None = None,
    *,
    seeds: Sequence[int] | None = None,
) -> list[Answer]:
    """Sends `prompts` (token ids) and returns their answers in order: all at once, or `in_flight` at a time, the next one
    as soon as an answer is whole; or each at its time of `arrivals` (seconds from now), whatever the others do. Times are
    then counted from when a request was due: a client that is late must not make the server look fast.

    `sampling` holds temperature, max_tokens, seed …, as the completions API names them; `seeds` gives each prompt its own.
    Raises PartFailedError when the server refuses, breaks off, says what is no completion or takes longer than `timeout_s`
    for one whole answer, from when it was sent.
    """
    own = [sampling | {"seed": seed} for seed in seeds] if seeds is not None else [sampling] * len(prompts)

    async def all_of_them() -> list[Answer]:
        places = asyncio.Semaphore(in_flight if in_flight and not arrivals else max(1, len(prompts)))
        began = time.perf_counter()

        async def one(prompt: Sequence[int], how: dict[str, Any], arrival: float | None) -> Answer:
            async with places:
                if arrival is not None:
                    await asyncio.sleep(began + arrival - time.perf_counter())
                started = time.perf_counter() if arrival is None else began + arrival
                return await _within(timeout_s, url, _stream(http, url, model, prompt, how, started))

        # trust_env off: a proxy set for the outside world must not see loopback traffic. No limit: httpx would let 100
        # requests through and time the others while they wait here. No timeout: its own is of the gaps between bytes, and
        # a server that trickles would never meet it
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:
            due: Sequence[float | None] = arrivals or [None] * len(prompts)
            return await asyncio.gather(*map(one, prompts, own, due))

    try:
        return asyncio.run(all_of_them())
    except httpx.HTTPError as e:
        raise PartFailedError(f"{url}: the server broke off ({type(e).__name__}: {e})") from e


async def _within(timeout_s: float, url: str, request: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await request
    except TimeoutError:
        raise PartFailedError(f"{url}: the server did not answer within {timeout_s:g} s") from None


async def _stream(
    http: httpx.AsyncClient, url: str, model: str, prompt: Sequence[int], sampling: dict[str, Any], started: float
) -> Answer:
    body = {
        "model": model,
        "prompt": list(prompt),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **sampling,
    }
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    finish, used, started_at = "", -1, time.time() - (time.perf_counter() - started)
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise PartFailedError(f"{url}: the server refused a request ({response.status_code}: {text[:300]})")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            at = time.perf_counter() - started
            with _no_completion(url):
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise PartFailedError(f"{url}: the server broke off ({event['error']})")
                for choice in event["choices"]:
                    tokens = choice.get("token_ids") or []
                    if tokens:
                        ids += tokens
                        arrivals.append((at, len(tokens)))
                    finish = choice.get("finish_reason") or finish
                if event.get("usage"):
                    used = int(event["usage"]["completion_tokens"])
    if used < 0 or not finish:
        raise PartFailedError(f"{url}: the answer ended without a finish reason or usage: the server broke off")
    if not arrivals:
        raise PartFailedError(f"{url}: the answer holds no token ids (usage says {used} tokens)")
    return Answer(ids, arrivals, used, finish, started_at)


@contextlib.contextmanager
def _no_completion(url: str) -> Iterator[None]:
    """What reading an answer raises where it is none: JSON that is broken, or of another shape."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
        raise PartFailedError(f"{url}: the server's answer is no completion ({type(e).__name__}: {e})") from e


def prompt_log_probs(
    url: str, model: str, prompts: Sequence[Sequence[int]], heads: int, timeout_s: float = 600, in_flight: int = 8
) -> list[list[dict[int, float]]]:
    """Of each prompt (token ids), at each position, the model's `heads` likeliest tokens there by the prompt before it, with
    their log-probs at temperature 1; {} at the first position. Raises PartFailedError as `complete` does."""

    async def all_of_them() -> list[list[dict[int, float]]]:
        places = asyncio.Semaphore(in_flight)

        async def one(prompt: Sequence[int]) -> list[dict[int, float]]:
            body = {"model": model, "prompt": list(prompt), "prompt_logprobs": heads, "max_tokens": 1, "temperature": 0}
            async with places:
                response = await _within(timeout_s, url, http.post(f"{url}/v1/completions", json=body))
            if response.status_code != 200:
                raise PartFailedError(
                    f"{url}: the server refused a request ({response.status_code}: {response.text[:300]})"
                )
            with _no_completion(url):
                given = response.json()["choices"][0]["prompt_logprobs"]
                return [_head(position or {}, token, heads) for position, token in zip(given, prompt, strict=True)]

        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            return await asyncio.gather(*map(one, prompts))

    try:
        return asyncio.run(all_of_them())
    except httpx.HTTPError as e:
        raise PartFailedError(f"{url}: the server broke off ({type(e).__name__}: {e})") from e


def _head(position: dict[str, dict[str, float]], token: int, heads: int) -> dict[int, float]:
    """vLLM adds the prompt's own token where it is none of the likeliest."""
    found = {int(id): entry["logprob"] for id, entry in position.items()}
    if len(found) > heads:
        del found[token]
    return found
