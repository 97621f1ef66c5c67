"""Whether a server that others run holds the target: its name, its vocabulary, enough log-probs of the untouched distribution,
and the weights that the servers before it, it itself, or the answers recorded already had.

A server is checked when it first answers and whenever it comes back: what listens on its port then may be another model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx
import numpy as np

from distill.requests import Request
from distill.server_http import Busy, Pool, Server, body_of, choice_of, completion_of, object_of, post, said_by
from pairing.errors import InputError, PartFailedError

PROBE = "Speculative decoding: 3 × 14 = 42; naïve café, Größe, 東京, привет, שלום 🙂\n\n\tdef f(x):  return x**2"
DETOKENIZED = 8192  # ids per request when vocabularies are compared
SAME = 0.1  # total variation between two servers' heads up to which they hold the same weights: 16-bit rounding and batching


async def check_all(http: httpx.AsyncClient, pool: Pool) -> None:
    started = time.monotonic()
    while True:
        results = await asyncio.gather(*(_try(check_server(http, pool, s), s) for s in pool.servers if not s.model))
        wrong = next((e for e in results if e is not None), None)
        if wrong is not None:
            raise wrong
        if any(s.model for s in pool.servers):
            break
        if time.monotonic() - started > pool.patience:
            raise PartFailedError(
                f"no server answers ({'; '.join(f'{s.url}: {s.last_error}' for s in pool.servers[:4])}): start them, or "
                "correct servers=[…]"
            )
        await asyncio.sleep(min(1.0, pool.patience / 4))
    for s in pool.servers:
        if not s.model:
            pool.note(f"{s.url} does not answer ({s.last_error}): the others begin, it is tried again")


async def _try(check: Coroutine[Any, Any, None], server: Server) -> InputError | PartFailedError | None:
    """What is wrong with a server that answers; None where nothing is, or where it does not answer now."""
    try:
        await check
    except (httpx.TransportError, Busy) as e:
        server.fail(e)
    except (InputError, PartFailedError) as e:
        return e
    return None


async def check_server(http: httpx.AsyncClient, pool: Pool, server: Server) -> None:
    """That the server holds the target: name, vocabulary, enough log-probs, of the untouched distribution, and the same
    weights as the servers before it, as it had itself before, and as what is recorded. Sets server.model."""
    response = await http.get(f"{server.url}/v1/models")
    if response.status_code == 429 or response.status_code >= 500:
        raise Busy(f"{response.status_code}: {said_by(response)}")
    if response.status_code != 200:
        raise PartFailedError(f"{server.url}/v1/models: refused ({response.status_code}: {said_by(response)})")
    model = _model_of(server.url, object_of(response, "/v1/models").get("data") or [], pool)
    await _check_vocabulary(http, pool, server, str(model["id"]))
    heads = [await _probe(http, pool, server, str(model["id"]), one) for one in pool.probes]
    # nothing is awaited from here on: of two that are checked at once, the later one sees the other's
    if not pool.heads:
        pool.heads, pool.heads_of = heads, server.url
    _require_same_weights(pool, server, heads)
    length = model.get("max_model_len")
    if length:
        pool.context = min(pool.context or length, length)
    server.model, server.up = str(model["id"]), True


def _require_same_weights(pool: Pool, server: Server, heads: Sequence[dict[int, float]]) -> None:
    apart = max((_total_variation(a, b) for a, b in zip(pool.heads, heads, strict=True)), default=0.0)
    if apart <= SAME:
        return
    far = f"distributions {apart:.2f} apart (total variation)"
    if pool.heads_of is None:
        raise InputError(
            f"{server.url} and the answers that are recorded already give {far} after the same prompt: it holds other weights "
            "than the servers that began; serve those again, or name another out"
        )
    if pool.heads_of == server.url:
        raise InputError(
            f"{server.url} went down and came back with other weights: before and after, it answers the same prompt with "
            f"{far}; serve the target there and start the same command again"
        )
    raise InputError(
        f"{server.url} and {pool.heads_of} answer the same prompt with {far}: they hold different weights; serve the target on "
        "both"
    )


def _model_of(url: str, models: Sequence[dict[str, Any]], pool: Pool) -> dict[str, Any]:
    listed = ", ".join(f"{m.get('id')} (from {m.get('root')})" for m in models) or "none"
    if pool.served_model is not None:
        for m in models:
            if m.get("id") == pool.served_model:
                return m
        raise InputError(f"{url} serves no model {pool.served_model!r}: it serves {listed}")
    for m in models:
        if any(str(m.get(key) or "").rstrip("/").split("/")[-1] in pool.names for key in ("root", "id")):
            return m
    raise InputError(
        f"{url} serves {listed}, not {pool.target}: serve the target there, or, where it is the target under another name, "
        "give served_model=…"
    )


async def _check_vocabulary(http: httpx.AsyncClient, pool: Pool, server: Server, model: str) -> None:
    """The same segmentation of a text, and the same text of every id (fault D2)."""
    wrong = f"{server.url}: {model} has another tokenizer than {pool.target} ({{}}): serve the target there, as it is"
    body = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    theirs = (await post(http, server, "/tokenize", body)).get("tokens")
    if theirs != pool.tokenizer.encode(PROBE, add_special_tokens=False):
        raise InputError(wrong.format("it segments a text otherwise"))
    ids = sorted(pool.tokenizer.get_vocab().values())
    for start in range(0, len(ids), DETOKENIZED):
        part = ids[start : start + DETOKENIZED]
        text = str((await post(http, server, "/detokenize", {"model": model, "tokens": part})).get("prompt"))
        # spaces apart: versions differ in how they tidy them
        if "".join(text.split()) != "".join(str(pool.tokenizer.decode(part)).split()):
            raise InputError(wrong.format(f"its ids {part[0]} to {part[-1]} are other texts"))


async def _probe(http: httpx.AsyncClient, pool: Pool, server: Server, model: str, request: Request) -> dict[int, float]:
    """id -> probability: the head of the distribution after a prompt, the same at every temperature."""
    heads, k = [], pool.top_logprobs
    for temperature in (1.0, 2.0):  # vLLM takes at most 2
        body = body_of(model, request.prompt_ids, pool.top_logprobs, pool.endings) | {
            "max_tokens": 1,
            "temperature": temperature,
        }
        try:
            choice = choice_of(await post(http, server, "/v1/completions", body))
        except PartFailedError as e:
            if "logprobs" in str(e):
                raise InputError(
                    f"{server.url} gives fewer than top_logprobs={k} log-probs: start it with --max-logprobs {k}, or lower "
                    "top_logprobs"
                ) from e
            raise
        except Busy as e:  # named, since no server ever comes up where such a prompt is among the probes
            raise Busy(f"prompt {request.prompt.id}: {e}", e.rest_s, e.full) from e
        done = completion_of(request, choice, k, server.url)
        heads.append(dict(zip(done.head_ids_NK[0].tolist(), np.exp(done.head_logprobs_NK[0]).tolist(), strict=True)))
    if max(sum(head.values()) for head in heads) > 1.01 or _total_variation(*heads) > SAME:
        raise InputError(
            f"{server.url}: its log-probs are not those of the untouched distribution: start it with --logprobs-mode raw_logprobs"
        )
    return heads[0]


def _total_variation(p: dict[int, float], q: dict[int, float]) -> float:
    """Half the distance of two heads; an id that only one of them holds has next to no probability in the other."""
    return sum(abs(p.get(i, 0.0) - q.get(i, 0.0)) for i in p.keys() | q.keys()) / 2
