"""The target answers on vLLM servers elsewhere: one client, many nodes, and nothing lost when one of them dies.

A server that fails rests, longer each time, and is checked anew before it gets more (server_checks), since what comes back on
its port may be another model; what it held goes to the others. server_http says what goes over the line.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from distill.requests import Answerer, Completion, Failed, Request, Sampling, ending_ids, request_seed
from distill.server_checks import check_all, check_server
from distill.server_http import (
    CONNECT_S,
    Busy,
    Pool,
    Refused,
    Server,
    body_of,
    choice_of,
    completion_of,
    post,
    require_health,
    require_own_end,
)
from pairing.errors import PartFailedError
from pairing.source import ModelSource, servable

ANSWER_S = 900.0
MOST_ERRORS = (
    6  # server errors and time-outs of one request before it is given up: it, and not the servers, is at fault
)
OF_THE_PROMPT = (400, 413, 422)  # what a server says to a request that it would never take; 401 or 404 it says to all
NAMED = 100  # prompts that are named with what failed at a server; a node that goes down fails all that it held


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
        loop.run_until_complete(check_all(http, pool))
        yield (
            (lambda waiting, sampling: _answers(loop, http, pool, waiting, sampling)),
            pool.context,
            lambda: _counts(pool),
        )
    finally:
        loop.run_until_complete(http.aclose())
        loop.close()


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
                await require_health(http, server)
                await check_server(http, pool, server)
            body = body_of(server.model, request.prompt_ids, sampling.top_logprobs, pool.endings) | {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": request_seed(sampling.seed, request.key) if sampling.temperature else None,
            }
            asked = True
            choice = choice_of(await post(http, server, "/v1/completions", body))
            done = completion_of(request, choice, sampling.top_logprobs, server.url)
            require_own_end(done, sampling.max_tokens, pool.endings, server.url)
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
