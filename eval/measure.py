"""Serves every arm in vLLM and sends all of them the same prompts, in turn; writes what happened, block by block.

A block is one repeat of one group of one workload on all arms at hand. With one request in flight the arms take turns prompt
by prompt, so that a noisy machine is noisy for all; with more, block by block: a closed loop keeps its requests in flight, and
turns of a few prompts would measure batches that run empty. Counters are scraped around each block. A block is written when it is
whole; a run that was stopped goes on with the first block that is not there. eval/results.py makes results.jsonl from the blocks.
"""

from __future__ import annotations

import contextlib
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from eval import client, counters, effective, losslessness, open_loop, server, statistics
from pairing.errors import PartFailedError
from pairing.files import append_jsonl, read_jsonl, write_jsonl
from pairing.progress import bar

WARMUP_TOKENS = 16
# vLLM's processes poll each other for 1 s after their last message (0.32: busy_loop_s in shm_broadcast.py). Where
# servers share cores, the arm that was last would slow the next one's prefill.
SETTLE_S = 1.2


AGAIN = "target-again"  # A/A: the target alone a second time, whose "speedup" is the machine's noise


@dataclass(frozen=True)
class Arm:
    name: str
    kind: str  # "target" (named so, or AGAIN), "draft_model", "ngram", "suffix" or "speculator"
    model: Path | None = None
    num_speculative_tokens: int = 0
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"  # argmax drafting, vLLM's default
    schedule: tuple[tuple[int, int, int], ...] = ()  # K by batch size: (from, to, K)
    prompt_lookup: tuple[int, int] = (2, 4)  # n-gram lengths, shortest and longest
    parallel_drafting: bool = False  # all drafts of a round from one pass of the drafter
    synthetic: tuple[float, ...] = ()  # chances that the engine accepts drafts with, whatever they are
    method: str | None = None  # of a speculator: eagle3, medusa, …

    def speculation(self) -> dict[str, Any] | None:
        """The --speculative-config of this arm."""
        k = self.num_speculative_tokens
        if self.kind == "target":
            return None
        if self.kind == "ngram":
            low, high = self.prompt_lookup
            return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": low, "prompt_lookup_max": high}
        if self.kind == "suffix":  # of its own request alone: answers kept from before would be replayed (fault D20)
            return {"method": "suffix", "num_speculative_tokens": k, "suffix_decoding_max_cached_requests": 0}
        words: dict[str, Any] = {"method": self.method or "draft_model", "model": str(self.model)}
        words["num_speculative_tokens"] = k
        words |= {"parallel_drafting": True} if self.parallel_drafting else {}
        if self.synthetic:
            words |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(self.synthetic)}
        if self.schedule:
            words["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in self.schedule]
        return (
            words if self.draft_sample_method == "greedy" else words | {"draft_sample_method": self.draft_sample_method}
        )


@dataclass(frozen=True)
class Request:
    id: str
    prompt_ids: list[int]
    max_tokens: int
    group: str | None  # "seen=true": reported apart
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is measured. `resident`: all servers up at once and arms interleaved by prompt; else one server at a time,
    interleaved by repeat (for machines whose memory holds one engine)."""

    target: Path
    arms: list[Arm]
    workloads: dict[str, list[Request]]
    settings: server.Settings
    repeats: int = 1
    minutes: float | None = None  # no new repeat is begun after this long; the first is always finished
    concurrencies: tuple[int, ...] = (1,)  # requests in flight
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    warmup: int = 2
    resident: bool = True
    request_timeout_s: float = 600  # for one whole answer
    start_timeout_s: float = 900
    precision: float | None = None  # no new repeat is begun once every speedup's half_width is at most this
    rates: tuple[float, ...] = ()  # requests/s of the open loop, beside `concurrencies`; not with `resident`

    @property
    def loads(self) -> list[tuple[int | None, float | None]]:
        """(requests in flight, None), or (None, requests/s)."""
        return [*((c, None) for c in self.concurrencies), *((None, r) for r in self.rates)]


@dataclass(frozen=True)
class Key:
    """What a block is of; its fields stand in each row that it writes."""

    workload: str
    group: str | None
    temperature: float
    concurrency: int | None  # None where requests arrive at a rate
    repeat: int
    rate: float | None = None


Block = tuple[Key, list[Request]]


def key_of(row: Mapping[str, Any]) -> Key:
    return Key(*(row.get(f.name) for f in fields(Key)))  # type: ignore[arg-type]  # rows of before there was a rate lack it


def blocks(plan: Plan) -> list[Block]:
    """Every block in the order in which it runs."""
    return [
        (Key(name, group, temperature, concurrency, repeat, rate), [r for r in requests if r.group == group])
        for repeat in range(plan.repeats)
        for temperature in plan.temperatures
        for concurrency, rate in plan.loads
        for name, requests in plan.workloads.items()
        for group in dict.fromkeys(r.group for r in requests)
    ]


def sessions(plan: Plan) -> list[tuple[list[Arm], list[Block]]]:
    """Which arms are served together, and the blocks that they run: all at once, or each by itself and in turn."""
    if plan.resident:
        return [(plan.arms, blocks(plan))]
    return [
        ([arm], [(key, requests) for key, requests in blocks(plan) if key.repeat == repeat])
        for repeat in range(plan.repeats)
        for arm in (plan.arms if repeat % 2 == 0 else plan.arms[::-1])
    ]


def measure(plan: Plan, out: Path) -> None:
    """Runs the blocks of `plan` that `out` does not hold yet. Appends to out/requests.jsonl and out/blocks.jsonl.

    A block in which an arm's server fails is void for it, with the reason, and the rest goes on: arms that are up
    together without that arm, an arm by itself on a new server.
    Raises PartFailedError where the target alone cannot be served: then there is nothing to compare with.
    """
    done = _keep_whole_blocks(plan, out)
    todo = [(arms, [b for b in work if b[0] not in done[arms[0].name]]) for arms, work in sessions(plan)]
    started = time.monotonic()
    allowed: dict[int, bool] = {}  # decided once a repeat, so that every arm has it or none

    begun = {key.repeat for keys in done.values() for key in keys}

    def may_begin(repeat: int) -> bool:
        if repeat not in allowed:
            expired = plan.minutes is not None and time.monotonic() - started > 60 * plan.minutes
            # one that a stopped run had begun is finished: half a repeat is no reason to leave the other half out
            narrow = repeat not in begun and plan.precision is not None and precise(plan, out)
            allowed[repeat] = repeat == 0 or not (expired or narrow)
        return allowed[repeat]

    total = sum(len(requests) * len(arms) for arms, work in todo for _, requests in work)
    with bar("measuring", total) as advance:
        for arms, work in todo:
            # each repeat is decided on when its turn comes, not when the servers start
            while work := [b for b in work if allowed.get(b[0].repeat, True)]:
                if not may_begin(work[0][0].repeat):
                    continue
                advance(0, f"starting {len(arms)} servers")
                with _serving(plan, arms, out) as (servers, dead):
                    never_came_up = bool(dead)
                    lossy = _check_lossless(plan, out, servers, dead, advance)
                    while work and (plan.resident or never_came_up or not dead):
                        key, requests = work.pop(0)
                        if may_begin(key.repeat):
                            out_of_it = ChainMap(dead, lossy.get(key.temperature, {}))  # what dies is written to `dead`
                            _write_block(out, _run_block(plan, key, requests, arms, servers, out_of_it, advance))
        if plan.arms[0].name == "target" and _unjudged(
            plan, out
        ):  # one server at a time: the target was up before these draws were made
            with _serving(plan, plan.arms[:1], out) as (servers, dead):
                _check_lossless(plan, out, servers, dead, advance)


def precise(plan: Plan, out: Path) -> bool:
    """Whether every arm's speedup in every cell is known to plan.precision by now; what was never answered can't become so."""
    cells: dict[Key, dict[str, list[dict[str, Any]]]] = {}
    for row in read_jsonl(out / "requests.jsonl"):
        cell = cells.setdefault(replace(key_of(row), group=None, repeat=0), {arm.name: [] for arm in plan.arms})
        cell[row["arm"]].append(row)
    for cell in cells.values():
        base, *others = cell.values()
        for gain in (statistics.speedup(rows, base) for rows in others):
            if gain and (gain.half_width is None or gain.half_width > (plan.precision or 0)):
                return False
    return True


def _unjudged(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """The lines of draws.jsonl that losslessness.jsonl has no verdict on."""
    judged = {(r["arm"], r["temperature"]) for r in read_jsonl(out / "losslessness.jsonl")}
    return [r for r in read_jsonl(out / "draws.jsonl") if (r["arm"], r["temperature"]) not in judged]


def _check_lossless(
    plan: Plan, out: Path, servers: Mapping[str, server.Server], dead: dict[str, str], advance: Any
) -> dict[float, dict[str, str]]:
    """Draws from each arm that is up and speculates, at each temperature > 0; judges, where the target alone is up, what was
    drawn. temperature -> arm -> why its cells are void, as far as it is known by now. eval/losslessness.py says how."""
    asked = [(arm, t) for arm in plan.arms if arm.speculation() for t in plan.temperatures if t]
    prompts, in_flight = _shortest(plan), plan.settings.max_num_seqs
    drawn = {(r["arm"], r["temperature"]) for r in read_jsonl(out / "draws.jsonl")}
    for arm, t in asked:
        if arm.name not in servers or arm.name in dead or (arm.name, t) in drawn:
            continue
        advance(0, f"is {arm.name} lossless at temperature {t:g}?")
        length = min(losslessness.length_for(arm.num_speculative_tokens), min(r.max_tokens for r in prompts) - 1)
        try:
            draws = losslessness.draw(
                servers[arm.name].url, server.SERVED_NAME, [r.prompt_ids for r in prompts], t, max(1, length),
                f"{plan.seed} {arm.name} {t}", plan.request_timeout_s, in_flight,
            )  # fmt: skip
        except PartFailedError as e:
            dead[arm.name] = f"{e} (log: {servers[arm.name].log})"
            continue
        append_jsonl(out / "draws.jsonl", {"arm": arm.name, "temperature": t, "draws": [asdict(d) for d in draws]})
    if "target" in servers and "target" not in dead:
        for row in _unjudged(plan, out):
            draws = [losslessness.Draw(**d) for d in row["draws"]]
            heads = losslessness.score(
                servers["target"].url, server.SERVED_NAME, draws, plan.request_timeout_s, in_flight
            )
            found = losslessness.judge(draws, heads, row["temperature"], len(asked))
            append_jsonl(out / "losslessness.jsonl", {"arm": row["arm"], **found})
    lossy: dict[float, dict[str, str]] = {}
    for row in read_jsonl(out / "losslessness.jsonl"):
        if not row["passed"]:
            lossy.setdefault(row["temperature"], {})[row["arm"]] = row["reason"]
    return lossy


def _shortest(plan: Plan) -> list[Request]:
    """The prompts of the check, from every workload: the shortest, as each is read once a draw."""
    each = -(-losslessness.PROMPTS // len(plan.workloads))
    return [r for requests in plan.workloads.values() for r in sorted(requests, key=lambda r: len(r.prompt_ids))[:each]]


@contextlib.contextmanager
def _serving(plan: Plan, arms: Sequence[Arm], out: Path) -> Iterator[tuple[dict[str, server.Server], dict[str, str]]]:
    """Servers of these arms by name, warmed up, and the reasons of those that did not come up."""
    dead: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        servers: dict[str, server.Server] = {}
        started = time.monotonic()
        for arm in arms:
            log = out / "logs" / f"{arm.name}.log"
            one = server.start(arm.name, plan.target, arm.speculation(), plan.settings, log)
            stack.callback(server.stop, one)
            servers[arm.name] = one
        for arm in arms:
            try:
                server.wait_until_ready(servers[arm.name], plan.start_timeout_s, started)
                _warm_up(plan, servers[arm.name])
            except PartFailedError as e:
                if arm.name == "target":
                    raise
                dead[arm.name] = str(e)
        yield servers, dead


def _warm_up(plan: Plan, one: server.Server) -> None:
    """Compilation, first-use kernels and page faults belong to no cell. The last prompts serve, answered in a few rounds:
    measured again later, cold, since the prefix cache is off."""
    for requests in plan.workloads.values():
        for request in requests[-plan.warmup :] if plan.warmup else []:
            client.complete(
                one.url,
                server.SERVED_NAME,
                [request.prompt_ids],
                _sampling(plan, plan.temperatures[0], request) | {"max_tokens": min(WARMUP_TOKENS, request.max_tokens)},
                plan.request_timeout_s,
            )


def _sampling(plan: Plan, temperature: float, request: Request) -> dict[str, Any]:
    """Pinned in every arm; answers end where they end by themselves (fault D23)."""
    return {"temperature": temperature, "max_tokens": request.max_tokens, "seed": plan.seed, "ignore_eos": False}


def _run_block(
    plan: Plan,
    key: Key,
    requests: Sequence[Request],
    arms: Sequence[Arm],
    servers: Mapping[str, server.Server],
    dead: MutableMapping[str, str],
    advance: Any,
) -> list[dict[str, Any]]:
    """One block: the rows to write, a block row a void or counted arm, its request rows before it."""
    head = asdict(key)
    before: dict[str, counters.Scrape] = {}
    for name, one in servers.items():
        if name not in dead:
            try:
                before[name] = counters.parse(client.metrics(one.url))
            except PartFailedError as e:  # it died after the block before
                dead[name] = f"{e} (log: {one.log})"
    rows: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    clock = {arm.name: 0.0 for arm in arms}
    # a turn is one prompt where one is in flight; else the whole block, in which the next one goes when one is answered
    size = 1 if key.concurrency == 1 and len(arms) > 1 else len(requests)
    due = open_loop.arrival_times(key.rate, len(requests), plan.seed, key.repeat) if key.rate else None
    for number, first in enumerate(range(0, len(requests), size)):
        batch = requests[first : first + size]
        turn = (number + key.repeat) % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:  # nobody is always first after a pause, or always after the same arm
            advance(len(batch), f"{key.workload} {key.group or ''} {arm.name}")
            if arm.name in dead:
                continue
            if len(arms) > 1:
                time.sleep(SETTLE_S)
            began = time.perf_counter()
            try:
                # one turn shares its sampling: every max_tokens of a workload is the same
                answers = client.complete(
                    servers[arm.name].url,
                    server.SERVED_NAME,
                    [r.prompt_ids for r in batch],
                    _sampling(plan, key.temperature, batch[0]),
                    plan.request_timeout_s,
                    key.concurrency,
                    due,
                )
                took = time.perf_counter() - began
                # within the try: an answer whose tokens are not those of its usage is no figure either
                measured = [_request_row(arm, r, a) for r, a in zip(batch, answers, strict=True)]
            except PartFailedError as e:
                dead[arm.name] = f"{e} (log: {servers[arm.name].log})"
                continue
            clock[arm.name] += took
            rows[arm.name] += [{"arm": arm.name, **head, **row} for row in measured]
    written: list[dict[str, Any]] = []
    for arm in arms:
        block: dict[str, Any] = {"arm": arm.name, **head, "void": dead.get(arm.name), "counts": None}
        block["sampling"] = _sampling(plan, key.temperature, requests[0])
        if arm.name not in dead:
            one = servers[arm.name]
            try:
                counts = counters.difference(before[arm.name], counters.parse(client.metrics(one.url)))
                block["counts"] = asdict(counts)
            except PartFailedError as e:
                block["void"] = str(e)
            block |= {"seconds": clock[arm.name], "memory_mib": one.memory_mib(), "startup_s": one.startup_s,
                      "command": server.serve_line(one.command), "effective": effective.read(one.log)}  # fmt: skip
        written += [*rows[arm.name], block]
    return written


def _request_row(arm: Arm, request: Request, answer: client.Answer) -> dict[str, Any]:
    gaps = statistics.gaps(answer.arrivals, answer.output_tokens)
    return {
        "num_speculative_tokens": arm.num_speculative_tokens,
        "id": request.id,
        "tags": request.tags,
        "output_ids": answer.output_ids,
        "output_tokens": answer.output_tokens,
        "prompt_tokens": len(request.prompt_ids),
        "chunk_tokens": [tokens for _, tokens in answer.arrivals],
        "ttft_s": answer.arrivals[0][0],
        "e2e_s": answer.arrivals[-1][0],
        "tpot_s": gaps.tpot,
        "itl_s": gaps.per_token,
        "chunk_gap_s": gaps.per_chunk,
        "chunks": len(answer.arrivals),
        "finish_reason": answer.finish_reason,
        "started_at": answer.started_at,
    }


def _write_block(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Requests first: a block row says that all of its arm's requests are there."""
    for row in rows:
        append_jsonl(out / ("blocks.jsonl" if "counts" in row else "requests.jsonl"), row)


def _keep_whole_blocks(plan: Plan, out: Path) -> dict[str, set[Key]]:
    """The blocks that `out` holds whole, by arm; what a kill left of others is taken out of its files.

    Arms that are served together must all be there, or they were not measured side by side.
    """
    held: dict[str, set[Key]] = {arm.name: set() for arm in plan.arms}
    for row in read_jsonl(out / "blocks.jsonl"):
        held[row["arm"]].add(key_of(row))
    if plan.resident:
        common = set.intersection(*held.values())
        held = dict.fromkeys(held, common)
    for file in ("blocks.jsonl", "requests.jsonl"):
        rows = read_jsonl(out / file)
        keep = [r for r in rows if key_of(r) in held[r["arm"]]]
        if len(keep) < len(rows):
            write_jsonl(out / file, keep)
    return held
