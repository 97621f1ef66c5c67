"""The target answers on vLLM servers elsewhere: one client, many nodes, and nothing lost when one of them dies.

Prompts go as token ids and answers come back as token ids; log-probabilities are keyed `token_id:N`, so no text is ever
tokenised again. A server that fails rests, longer each time, and is checked anew before it gets more, since what comes back on
its port may be another model; what it held goes to the others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from distill.requests import Answerer, Completion, Failed, Request, Sampling, ending_ids, request_seed
from pairing.errors import InputError, PartFailedError
from pairing.source import ModelSource, servable

CONNECT_S, ANSWER_S = 10.0, 900.0
REST_S, LONGEST_REST_S = 0.5, 20.0  # a server rests this long after a failure, doubled each time
MOST_ERRORS = (
    6  # server errors and time-outs of one request before it is given up: it, and not the servers, is at fault
)
PROBE = "Speculative decoding: 3 × 14 = 42; naïve café, Größe, 東京, привет, שלום 🙂\n\n\tdef f(x):  return x**2"
DETOKENIZED = 8192  # ids per request when vocabularies are compared
SAME = 0.1  # total variation between two servers' heads up to which they hold the same weights: 16-bit rounding and batching
OF_THE_PROMPT = (400, 413, 422)  # what a server says to a request that it would never take; 401 or 404 it says to all
NAMED = 100  # prompts that are named with what failed at a server; a node that goes down fails all that it held


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


@contextmanager
def open_servers(
    urls: Sequence[str],
    target: ModelSource,
    tokenizer: Any,
    *,
    served_model: str | None,
    top_logprobs: int,
    probes: Sequence[Request],
    recorded: Sequence[tuple[Request, dict[int, float]]] = (),
    per_server: int = 64,
    patience: float = 120,
    api_key: str | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Answerer, int | None, Callable[[], dict[str, Any]]]]:
    """Checks every server that answers, and yields the Answerer, the shortest context among them and what tells the counts
    per server. `probes`: some of the work to come, on which all servers must agree; weights cannot be compared over HTTP.
    `recorded`: where a run goes on, some prompts that it has answered, each with the head that was recorded after it; they take
    the place of `probes`, so that what comes is of the weights that what is there came of.

    Raises InputError where a server holds another model, tokenizer or too few log-probs; PartFailedError where none answers.
    A server that is down is left for later. Each is checked when it comes, and whenever it comes back.
    """
    pool = Pool(
        [Server(url) for url in urls],
        target.name,
        tuple(name.rstrip("/").split("/")[-1] for name in (target.name, servable(target))),
        tokenizer,
        ending_ids(target.path),
        served_model,
        top_logprobs,
        [request for request, _ in recorded] or list(probes),
        [head for _, head in recorded],
        None,
        per_server,
        patience,
        {"Authorization": f"Bearer {api_key}"} if api_key else {},
        note,
    )
    loop = asyncio.new_event_loop()
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    # trust_env off: a proxy set for the outside world must not see the traffic of one's own nodes
    http = httpx.AsyncClient(
        timeout=timeout, trust_env=False, headers=pool.headers, limits=httpx.Limits(max_connections=None)
    )
    try:
        loop.run_until_complete(_check_all(http, pool))
        yield (
            (lambda waiting, sampling: _answers(loop, http, pool, waiting, sampling)),
            pool.context,
            lambda: _counts(pool),
        )
    finally:
        loop.run_until_complete(http.aclose())
        loop.close()


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


def _answers(
    loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient, pool: Pool, waiting: deque[Request], sampling: Sampling
) -> Iterator[Completion | Failed]:
    """The loop runs only while the caller waits; meanwhile answers wait in the sockets."""
    tasks: set[asyncio.Task[Completion | Failed]] = set()
    pool.down_since = None
    for server in pool.servers:
        server.failed = {}
    try:
        while waiting or tasks:
            while waiting and len(tasks) < sum(pool.per_server if s.up else 1 for s in pool.servers):
                tasks.add(loop.create_task(_one(http, pool, waiting.popleft(), sampling)))
            done, tasks = loop.run_until_complete(_first(tasks))
            # what is answered first: the caller may end it at the first that is not
            failed: list[Failed] = []
            error: BaseException | None = None
            for task in done:
                if task.exception() is not None:
                    error = task.exception()
                elif isinstance(found := task.result(), Failed):
                    failed.append(found)
                else:
                    yield found
            yield from failed
            if error is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(_end(tasks))


async def _first(tasks: set[asyncio.Task[Completion | Failed]]) -> tuple[set[Any], set[Any]]:
    return await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _end(tasks: set[asyncio.Task[Completion | Failed]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _one(http: httpx.AsyncClient, pool: Pool, request: Request, sampling: Sampling) -> Completion | Failed:
    """The answer to one request, from whichever server gives it; Failed where it, and not the servers, is at fault."""
    errors = 0
    while True:
        server, asked = await _free(pool), False
        server.in_flight += 1
        try:
            if not server.up or not server.model:
                # the process that answers now need not be the one that went down: all of it is checked again
                await _require_health(http, server)
                await _check(http, pool, server)
            body = _body(server.model, request.prompt_ids, sampling.top_logprobs, pool.endings) | {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": request_seed(sampling.seed, request.key) if sampling.temperature else None,
            }
            asked = True
            choice = _choice(await _post(http, server, "/v1/completions", body))
            done = completion_of(request, choice, sampling.top_logprobs, server.url)
            _require_own_end(done, sampling.max_tokens, pool.endings, server.url)
        except Refused as e:
            if not asked or e.status not in OF_THE_PROMPT:
                raise
            return Failed(request, f"prompt {request.prompt.id}: {e}; finished prompts are kept")
        except (httpx.TransportError, Busy) as e:
            server.fail(e)
            full = isinstance(e, Busy) and e.full
            if asked and not full and len(server.failed) < NAMED:
                server.failed[request.prompt.id] = server.last_error
            if asked and isinstance(e, Busy):
                pool.down_since = None  # it does answer: it is the prompt that ends this, not patience
            # a full server or a broken line says nothing about the prompt; an answer that takes for ever does
            errors += asked and not full and isinstance(e, httpx.ReadTimeout | Busy)
            if errors >= MOST_ERRORS:
                return Failed(
                    request,
                    f"{server.url}: prompt {request.prompt.id} failed {errors} times, the last with {server.last_error}; "
                    "finished prompts are kept: look at the server's log, and start the same command again",
                )
            continue
        finally:
            server.in_flight -= 1
        server.failures, server.answered, server.tokens = 0, server.answered + 1, server.tokens + len(done.ids)
        return done


def _require_own_end(done: Completion, max_tokens: int, endings: Sequence[int], url: str) -> None:
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


async def _require_health(http: httpx.AsyncClient, server: Server) -> None:
    response = await http.get(f"{server.url}/health", timeout=CONNECT_S)
    if response.status_code != 200:
        raise Busy(f"/health says {response.status_code}")


async def _free(pool: Pool) -> Server:
    """One that is down and has rested, to see whether it is back; else the least busy. Raises PartFailedError where all have
    been down for too long."""
    while True:
        now = time.monotonic()
        pool.down_since = None if any(s.up for s in pool.servers) else pool.down_since or now
        able = [s for s in pool.servers if now >= s.rests_until and s.in_flight < (pool.per_server if s.up else 1)]
        if able:
            return min(able, key=lambda s: (s.up, s.in_flight))
        if pool.down_since is not None and now - pool.down_since > pool.patience:
            errors = "; ".join(f"{s.url}: {s.last_error}" for s in pool.servers[:4])
            raise PartFailedError(
                f"no server has answered for {pool.patience:.0f} s ({errors}); finished prompts are kept, the same command "
                "goes on from there"
            )
        await asyncio.sleep(0.05)


def _body(model: str, prompt_ids: Sequence[int], top_logprobs: int, endings: Sequence[int]) -> dict[str, Any]:
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


async def _post(http: httpx.AsyncClient, server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's JSON. Raises Busy for what may go well another time, PartFailedError for what will not."""
    response = await http.post(f"{server.url}{path}", json=body)
    if response.status_code == 429 or response.status_code >= 500:
        after = response.headers.get("retry-after", "")
        rest = min(LONGEST_REST_S, float(after)) if after.isdigit() else None
        raise Busy(f"{response.status_code}: {_said(response)}", rest, full=response.status_code == 429)
    if response.status_code != 200:
        raise Refused(f"{server.url}{path}: refused ({response.status_code}: {_said(response)})", response.status_code)
    return _object(response, path)


def _object(response: httpx.Response, path: str) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:  # no JSON, or no UTF-8
        found = None
    if not isinstance(found, dict):
        raise Busy(f"{path}: an answer that is no JSON object")
    return found


def _choice(found: dict[str, Any]) -> dict[str, Any]:
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Busy(f"an answer without choices: {str(found)[:200]}")
    return choices[0]


def _said(response: httpx.Response) -> str:
    try:
        found = response.json()
        return str((found.get("error") or {}).get("message") or found)[:300]
    except (ValueError, AttributeError):
        return " ".join(response.text.split())[:300]


async def _check_all(http: httpx.AsyncClient, pool: Pool) -> None:
    started = time.monotonic()
    while True:
        results = await asyncio.gather(*(_try(_check(http, pool, s), s) for s in pool.servers if not s.model))
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


async def _check(http: httpx.AsyncClient, pool: Pool, server: Server) -> None:
    """That the server holds the target: name, vocabulary, enough log-probs, of the untouched distribution, and the same
    weights as the servers before it, as it had itself before, and as what is recorded. Sets server.model."""
    response = await http.get(f"{server.url}/v1/models")
    if response.status_code == 429 or response.status_code >= 500:
        raise Busy(f"{response.status_code}: {_said(response)}")
    if response.status_code != 200:
        raise PartFailedError(f"{server.url}/v1/models: refused ({response.status_code}: {_said(response)})")
    model = _model_of(server.url, _object(response, "/v1/models").get("data") or [], pool)
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
    theirs = (await _post(http, server, "/tokenize", body)).get("tokens")
    if theirs != pool.tokenizer.encode(PROBE, add_special_tokens=False):
        raise InputError(wrong.format("it segments a text otherwise"))
    ids = sorted(pool.tokenizer.get_vocab().values())
    for start in range(0, len(ids), DETOKENIZED):
        part = ids[start : start + DETOKENIZED]
        text = str((await _post(http, server, "/detokenize", {"model": model, "tokens": part})).get("prompt"))
        # spaces apart: versions differ in how they tidy them
        if "".join(text.split()) != "".join(str(pool.tokenizer.decode(part)).split()):
            raise InputError(wrong.format(f"its ids {part[0]} to {part[-1]} are other texts"))


async def _probe(http: httpx.AsyncClient, pool: Pool, server: Server, model: str, request: Request) -> dict[int, float]:
    """id -> probability: the head of the distribution after a prompt, the same at every temperature."""
    heads, k = [], pool.top_logprobs
    for temperature in (1.0, 2.0):  # vLLM takes at most 2
        body = _body(model, request.prompt_ids, pool.top_logprobs, pool.endings) | {
            "max_tokens": 1,
            "temperature": temperature,
        }
        try:
            choice = _choice(await _post(http, server, "/v1/completions", body))
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


def _counts(pool: Pool) -> dict[str, Any]:
    return {
        s.url: {
            "answered": s.answered,
            "tokens": s.tokens,
            "retries": s.retries,
            "last_error": s.last_error or None,
            "failed": dict(s.failed),
        }
        for s in pool.servers
    }
