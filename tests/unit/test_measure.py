"""Blocks, interleaving, resuming and results of `measure`, against a scripted stand-in for server and client.

The stand-in (labelled as such: no engine runs here) answers at once with counters that it keeps itself, so that every
figure is known by hand. tests/integration/test_measure.py does the same with real vLLM.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import client, effective, measure, report_text, results, server, verdict
from eval.measure import Arm, Plan, Request
from pairing.errors import PartFailedError
from pairing.files import read_jsonl, write_jsonl
from tests import fake_engine

ANSWER = [5, 6, 7, 8, 9]
OFFLINE = results.Offline(0.0, 3.9, (3.9, 4.0), 3.7)


class Engine:
    """A scripted server: emits ANSWER; with a drafter in chunks of 1 and 4 (one round, 3 of 4 drafts accepted)."""

    def __init__(self) -> None:
        self.drafts: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.order: list[str] = []
        self.fail_at: tuple[str, int] | None = None  # (arm, requests that it still answers)
        self.kill_after: int | None = None
        self.outputs: dict[str, list[int]] = {}
        self.started: list[str] = []
        self.in_flight: list[tuple[str, int, int]] = []  # (arm, prompts sent, of them at a time)
        self.arrivals: list[tuple[str, list[float] | None]] = []
        self.lossy: set[str] = set()
        self.checked: list[str] = []  # arms that were drawn from, "by target" where the target judged draws

    def prompt_log_probs(
        self, url: str, model: str, prompts: list[list[int]], heads: int, timeout_s: float, in_flight: int
    ) -> list[list[dict[int, float]]]:
        self.checked.append(f"by {url}")
        return [[dict.fromkeys(range(10), math.log(0.1)) for _ in p] for p in prompts]

    def start(self, arm: str, target: Path, speculation: Any, settings: Any, log: Path) -> server.Server:
        self.drafts[arm], self.tokens[arm] = 0, 0
        self.started.append(arm)
        return fake_engine.started(arm, log)

    def complete(
        self,
        url: str,
        model: str,
        prompts: list[list[int]],
        sampling: Any,
        timeout_s: float,
        in_flight: int = 1,
        arrivals: list[float] | None = None,
        *,
        seeds: list[int] | None = None,
    ) -> list[client.Answer]:
        if seeds is not None:  # of the losslessness check: any of ten tokens is as likely, unless the arm has a fault
            self.checked.append(url)
            draws = [[5] * 8 if url in self.lossy else random.Random(s).choices(range(10), k=8) for s in seeds]
            return [client.Answer(ids, [(0.1, 8)], 8, "length", 0.0) for ids in draws]
        self.order += [url] * len(prompts)
        self.arrivals.append((url, arrivals))
        self.in_flight.append((url, len(prompts), in_flight))
        if self.kill_after is not None and len(self.order) > self.kill_after:
            raise KeyboardInterrupt
        if self.fail_at and self.fail_at[0] == url and self.order.count(url) > self.fail_at[1]:
            raise PartFailedError(f"{url}: the server broke off")
        ids = self.outputs.get(url, ANSWER)
        self.tokens[url] += len(ids) * len(prompts)
        drafted = not url.startswith("target")
        self.drafts[url] += drafted * len(prompts)
        chunks = [(0.1, 1), (0.3, len(ids) - 1)] if drafted else [(0.1 * (i + 1), 1) for i in range(len(ids))]
        return [client.Answer(ids, chunks, len(ids), "stop", 0.0) for _ in prompts]

    def metrics(self, url: str) -> str:
        n = self.drafts[url]
        if url.startswith("target"):
            return fake_engine.metrics(self.tokens[url])
        return fake_engine.metrics(self.tokens[url], (n, 4 * n, 3 * n), (n, n, n, 0))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    fake_engine.install(monkeypatch, fake)
    monkeypatch.setattr(measure, "SETTLE_S", 0.0)
    monkeypatch.setattr(client, "prompt_log_probs", fake.prompt_log_probs)
    return fake


def plan(**kwargs: Any) -> Plan:
    arms = [Arm("target", "target"), Arm("drafter", "draft_model", Path("d"), 4), Arm("ngram", "ngram", None, 4)]
    requests = [Request(f"p{i}", [i], 8, f"seen={'true' if i < 3 else 'false'}", {}) for i in range(5)]
    values: dict[str, Any] = {"repeats": 2, "warmup": 1} | kwargs
    return Plan(Path("t"), arms, {"orders": requests}, server.Settings(), **values)


def write(p: Plan, out: Path) -> list[dict[str, Any]]:
    return results.write_results(p, out, {}, {("drafter", "orders", None): OFFLINE}, {}, {})


def cell(rows: list[dict[str, Any]], arm: str, group: str | None = None) -> dict[str, Any]:
    return next(r for r in rows if r["arm"] == arm and r["group"] == group)


def test_figures_by_hand(engine: Engine, tmp_path: Path) -> None:
    """D22, D21: counts are differences over the blocks (the warm-up's are not in them); groups apart and together."""
    p = plan()
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    drafter, target = cell(rows, "drafter"), cell(rows, "target")
    assert (drafter["num_drafts"], drafter["num_draft_tokens"], drafter["num_accepted_tokens"]) == (10, 40, 30)
    assert drafter["draft_acceptance_rate"] == 0.75
    assert drafter["acceptance_length"] == 4.0
    assert drafter["emitted_acceptance_length"] == 4.0
    assert drafter["num_accepted_tokens_per_pos"] == [10, 10, 10, 0]
    assert drafter["replay_acceptance_length"] == 3.9
    assert (drafter["replay_interval"], drafter["teacher_forced_acceptance_length"]) == ([3.9, 4.0], 3.7)
    assert drafter["speedup"] == pytest.approx(5 / 3)  # 0.5 s against 0.3 s for the same five tokens
    assert drafter["tpot_ms"]["p50"] == pytest.approx(50)  # 0.2 s for four tokens after the first
    assert drafter["chunk_gap_ms"]["p50"] == pytest.approx(200)
    assert target["tpot_ms"]["p50"] == pytest.approx(100)
    assert target["speedup"] is None
    assert target["acceptance_length"] is None
    assert (drafter["exact_match"], drafter["mismatches"]) == (1.0, [])
    assert cell(rows, "drafter", "seen=true")["num_drafts"] == 6
    assert cell(rows, "drafter", "seen=false")["prompts"] == 2


def test_arms_take_turns_by_prompt(engine: Engine, tmp_path: Path) -> None:
    measure.measure(plan(repeats=1, warmup=0), tmp_path)
    triples = [engine.order[i : i + 3] for i in range(0, len(engine.order), 3)]
    assert len(triples) == 5
    assert all(sorted(t) == ["drafter", "ngram", "target"] for t in triples)
    assert {t[0] for t in triples} == {"target", "drafter", "ngram"}


def test_one_server_at_a_time_turns_by_repeat(engine: Engine, tmp_path: Path) -> None:
    p = plan(resident=False, warmup=0)
    measure.measure(p, tmp_path)
    assert [engine.order[i] for i in range(0, 30, 5)] == ["target", "drafter", "ngram", "ngram", "drafter", "target"]
    assert cell(write(p, tmp_path), "drafter")["num_drafts"] == 10


@pytest.mark.parametrize("resident", [True, False])
def test_stopped_and_started_again_measures_the_rest_only(engine: Engine, tmp_path: Path, resident: bool) -> None:
    p = plan(resident=resident, warmup=0)
    engine.kill_after = 17  # in the middle of a block
    with pytest.raises(KeyboardInterrupt):
        measure.measure(p, tmp_path)
    before = len(read_jsonl(tmp_path / "blocks.jsonl"))
    assert 0 < before < 12
    engine.kill_after, engine.order = None, []
    measure.measure(p, tmp_path)
    assert len(engine.order) < 30
    drafter = cell(write(p, tmp_path), "drafter")
    assert (drafter["num_drafts"], drafter["repeats"], drafter["prompts"]) == (10, 2, 5)
    assert len(read_jsonl(tmp_path / "requests.jsonl")) == 30
    engine.order = []
    measure.measure(p, tmp_path)  # whole: nothing is served again
    assert engine.order == []


def test_requests_of_a_block_that_was_not_finished_are_taken_out(engine: Engine, tmp_path: Path) -> None:
    p = plan(repeats=1)
    measure.measure(p, tmp_path)
    blocks = (tmp_path / "blocks.jsonl").read_text().splitlines()
    (tmp_path / "blocks.jsonl").write_text("\n".join(blocks[:-1]) + "\n")  # killed before the last block row
    measure.measure(p, tmp_path)
    rows = read_jsonl(tmp_path / "requests.jsonl")
    assert len(rows) == len({(r["arm"], r["id"], r["repeat"]) for r in rows}) == 15


def test_an_arm_whose_server_dies_is_void_and_the_rest_goes_on(engine: Engine, tmp_path: Path) -> None:
    p = plan(warmup=0)
    engine.fail_at = ("drafter", 4)
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    assert "broke off" in cell(rows, "drafter")["void"]
    assert cell(rows, "drafter")["speedup"] is None
    assert cell(rows, "ngram")["void"] is None
    assert cell(rows, "ngram")["num_drafts"] == 10


@pytest.mark.parametrize(
    ("resident", "again"), [(True, ["drafter", "ngram", "target"]), (False, ["ngram", "drafter", "target"])]
)
def test_several_in_flight_are_a_closed_loop_whoever_else_is_up(
    engine: Engine, tmp_path: Path, resident: bool, again: list[str]
) -> None:
    """The next request goes when one is answered: a turn is the whole block, and another arm begins each repeat."""
    requests = {"orders": [Request(f"p{i}", [i], 8, None, {}) for i in range(5)]}
    p = replace(plan(repeats=2, warmup=0, concurrencies=(2,), resident=resident), workloads=requests)
    measure.measure(p, tmp_path)
    assert engine.in_flight == [(arm, 5, 2) for arm in ["target", "drafter", "ngram", *again]]
    rows = read_jsonl(tmp_path / "blocks.jsonl")
    write_jsonl(tmp_path / "blocks.jsonl", [row | {"seconds": 0.8} for row in rows])
    in_flight = {
        r["arm"]: r["in_flight"] for r in write(p, tmp_path)
    }  # five answers a block: of 0.5 s, with a drafter of 0.3 s
    assert in_flight == pytest.approx({"target": 2.5 / 0.8, "drafter": 1.5 / 0.8, "ngram": 1.5 / 0.8})


def test_at_a_rate_all_arms_get_the_same_arrivals(engine: Engine, tmp_path: Path) -> None:
    """Beside one request at a time; rows of their own, without a count of requests in flight. Another repeat, other times."""
    requests = {"orders": [Request(f"p{i}", [i], 8, None, {}) for i in range(5)]}
    p = replace(plan(repeats=2, warmup=0, resident=False, rates=(0.5,)), workloads=requests)
    measure.measure(p, tmp_path)
    assert [sent for _, sent in engine.arrivals].count(None) == 6  # three arms, two repeats
    timed = {(arm, tuple(sent)) for arm, sent in engine.arrivals if sent}
    assert {arm for arm, _ in timed} == {"target", "drafter", "ngram"}
    assert len({sent for _, sent in timed}) == 2
    assert all(len(sent) == 5 and sent[0] == 0 for _, sent in timed)
    drafter = [r for r in write(p, tmp_path) if r["arm"] == "drafter"]
    assert [(r["concurrency"], r["rate"], r["num_drafts"]) for r in drafter] == [(1, None, 10), (None, 0.5, 10)]
    assert "kept_up" not in drafter[0]
    assert drafter[1]["completed_requests_per_s"] == pytest.approx(10 / 0.6)  # each scripted answer takes 0.3 s from 0
    assert drafter[1]["speedup"] == pytest.approx(5 / 3)
    assert drafter[1]["acceptance_length_by_context"] == [{"from": 2, "to": 4, "rounds": 10, "acceptance_length": 4.0}]
    measure.measure(p, tmp_path)  # whole: nothing is served again
    assert len(engine.arrivals) == 12


def test_alone_a_server_that_dies_costs_one_block_and_the_next_one_gets_a_new_server(
    engine: Engine, tmp_path: Path
) -> None:
    p = plan(resident=False, repeats=1, warmup=0, concurrencies=(1, 2))  # blocks of 3 and 2 requests, twice
    engine.fail_at = ("drafter", 4)
    fake_start = server.start

    def start(arm: str, *rest: Any) -> server.Server:
        if engine.started.count("drafter") == 1 and arm == "drafter":
            engine.fail_at = None
        return fake_start(arm, *rest)

    server.start = start  # type: ignore[assignment]  # the fixture takes it back
    measure.measure(p, tmp_path)
    assert engine.started == ["target", "drafter", "drafter", "ngram"]
    blocks = [b for b in read_jsonl(tmp_path / "blocks.jsonl") if b["arm"] == "drafter"]
    assert [(b["concurrency"], b["group"], b["void"] is not None) for b in blocks] == [
        (1, "seen=true", False), (1, "seen=false", True), (2, "seen=true", False), (2, "seen=false", False),
    ]  # fmt: skip
    assert [r["void"] for r in write(p, tmp_path) if r["arm"] != "drafter"] == [None] * 12


def test_alone_a_server_that_never_comes_up_is_tried_once(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(one: server.Server, timeout_s: float, started: float) -> None:
        if one.arm == "drafter":
            raise PartFailedError("ended with code 1 at start: no memory")

    monkeypatch.setattr(server, "wait_until_ready", never)
    p = plan(resident=False, repeats=1, warmup=0)
    measure.measure(p, tmp_path)
    assert engine.started == ["target", "drafter", "ngram"]
    assert {r["void"] for r in write(p, tmp_path) if r["arm"] == "drafter"} == {"ended with code 1 at start: no memory"}


@pytest.mark.parametrize("resident", [True, False])
def test_an_answer_whose_tokens_are_not_those_of_its_usage_voids_its_cell(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    spoilt: list[str] = []

    def complete(url: str, *rest: Any, **more: Any) -> list[client.Answer]:
        answers = engine.complete(url, *rest, **more)
        if url != "drafter" or engine.order.count(url) <= 3 or spoilt:
            return answers
        spoilt.append(url)
        return [replace(a, output_tokens=a.output_tokens + 1) for a in answers]

    monkeypatch.setattr(client, "complete", complete)
    p = plan(repeats=1, warmup=0, resident=resident)
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    assert "the streamed chunks hold 5 tokens, the server's usage says 6" in cell(rows, "drafter", "seen=false")["void"]
    assert {r["void"] for r in rows if r["arm"] != "drafter" or r["group"] == "seen=true"} == {None}
    assert cell(rows, "ngram")["num_drafts"] == 5
    engine.order = []
    measure.measure(p, tmp_path)  # whole: nothing is served again
    assert engine.order == []


def test_no_arm_has_a_speedup_over_a_target_that_is_void(engine: Engine, tmp_path: Path) -> None:
    p = plan(repeats=1, warmup=0)
    engine.fail_at = ("target", 4)
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    assert "broke off" in cell(rows, "target")["void"]
    drafter = cell(rows, "drafter")
    assert (drafter["void"], drafter["acceptance_length"]) == (None, 4.0)
    assert (drafter["speedup"], drafter["speedup_interval"], drafter["exact_match"]) == (None, None, None)
    assert cell(rows, "drafter", "seen=true")["speedup"] == pytest.approx(5 / 3)  # of the blocks before it died


def test_a_mismatch_in_a_repeat_that_the_target_did_not_answer_is_explained_by_its_first() -> None:
    """As statistics.exact_match compares them."""
    base = [{"id": "p", "repeat": 0, "output_ids": ANSWER}]
    mismatch = {"id": "p", "repeat": 1, "position": 2, "target_token": 7, "arm_token": 3}
    known = {("orders", "p", 2): {7: -0.5, 3: -0.5001}}
    assert verdict.TIE in results._explain("orders", mismatch, known, {("orders", "p"): ANSWER}, base)


def test_every_arm_is_asked_with_the_same_sampling_and_its_rows_say_so(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D23. And answers that were made to run on are told."""
    sent: dict[str, list[dict[str, Any]]] = {"target": [], "drafter": [], "ngram": []}

    def complete(url: str, model: str, prompts: Any, sampling: Any, *rest: Any, **more: Any) -> list[client.Answer]:
        if more.get("seeds") is None:  # the losslessness check draws with a seed each
            sent[url].append(sampling)
        return engine.complete(url, model, prompts, sampling, *rest, **more)

    monkeypatch.setattr(client, "complete", complete)
    p = plan(repeats=1, warmup=1, temperatures=(0.0, 0.7), seed=3)
    measure.measure(p, tmp_path / "a")
    assert sent["target"] == sent["drafter"] == sent["ngram"]
    pinned = {"max_tokens": 8, "seed": 3, "ignore_eos": False}
    assert sent["target"] == [{"temperature": t, **pinned} for t in [0.0] * 6 + [0.7] * 5]  # the first of them warms up
    for block in read_jsonl(tmp_path / "a" / "blocks.jsonl"):
        assert block["sampling"] == {"temperature": block["temperature"], **pinned}
    rows = write(p, tmp_path / "a")
    assert {(r["settings"]["seed"], r["settings"]["ignore_eos"]) for r in rows} == {(3, False)}
    assert not any("ignore_eos" in alarm for alarm in verdict.judge(rows)["alarms"])
    monkeypatch.setattr(measure, "_sampling", lambda *_: {"temperature": 0.0, **pinned, "ignore_eos": True})
    p = plan(repeats=1)
    measure.measure(p, tmp_path / "b")
    alarms = verdict.judge(write(p, tmp_path / "b"))["alarms"]
    assert "Not representative: orders was measured with ignore_eos: answers ran past their end." in alarms


@pytest.mark.parametrize(
    ("hits", "void", "told"),
    [
        (20, "prefix cache hit rate 2.0%: the cell measured the cache", "drafter 2.0\u00a0%"),
        (5, None, "drafter 0.5\u00a0%"),
        (0, None, None),
    ],
)
def test_what_came_from_the_prefix_cache_is_told_and_above_one_percent_void(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hits: int, void: str | None, told: str | None
) -> None:
    """D20. Of 1000 tokens that are looked up for each answer, `hits` are found."""

    def metrics(url: str) -> str:
        n = engine.drafts[url] if url == "drafter" else 0
        counts = {"queries": 1000 * n, "hits": hits * n}
        lines = [f'vllm:prefix_cache_{name}_total{{engine="0"}} {count}\n' for name, count in counts.items()]
        return engine.metrics(url) + "".join(lines)

    monkeypatch.setattr(client, "metrics", metrics)
    p = plan(repeats=1, warmup=0)
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    drafter = cell(rows, "drafter")
    assert (drafter["prefix_cache_hit_rate"], drafter["void"]) == (hits / 1000, void)
    assert (drafter["speedup"] is None) == bool(void)
    text = report_text.markdown_results(rows)
    assert f"\n\nPrefix cache hit rate: {told}.\n" in text if told else "refix cache" not in text


def test_a_server_that_died_between_two_blocks_is_void(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def metrics(url: str) -> str:
        asked.append(url)
        if url == "drafter" and asked.count(url) > 2:  # before and after the first block
            raise PartFailedError(f"{url}/metrics: ConnectError")
        return engine.metrics(url)

    monkeypatch.setattr(client, "metrics", metrics)
    p = plan(repeats=1, warmup=0)
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    assert "ConnectError" in cell(rows, "drafter", "seen=false")["void"]
    assert cell(rows, "drafter", "seen=true")["void"] is None
    assert cell(rows, "ngram")["void"] is None


def test_outputs_that_differ_are_explained(engine: Engine, tmp_path: Path) -> None:
    p = plan(repeats=1)
    engine.outputs = {"drafter": [5, 6, 3, 8, 9], "ngram": [5, 6, 4, 8, 9]}
    measure.measure(p, tmp_path)
    log_probs = {("orders", f"p{i}", 2): {7: -0.6930, 3: -0.6932} for i in range(5)}
    references = {("orders", f"p{i}"): ANSWER for i in range(5)}
    rows = results.write_results(p, tmp_path, {}, {}, log_probs, references)
    drafter, ngram = cell(rows, "drafter"), cell(rows, "ngram")
    assert drafter["exact_match"] == 0.0
    assert drafter["mismatches"][0] | {"id": ""} == {
        "id": "", "repeat": 0, "position": 2, "target_token": 7, "arm_token": 3,
        "why": "log-probs under the target -0.6930 and -0.6932: a tie in rounding",
    }  # fmt: skip
    assert "no tie" in ngram["mismatches"][0]["why"]


@pytest.mark.parametrize("resident", [True, False])
def test_a_sampled_cell_counts_only_if_the_arm_was_found_lossless(
    engine: Engine, tmp_path: Path, resident: bool
) -> None:
    """Each arm is drawn from once a temperature > 0, judged by the target alone once that is up, and not again on resuming."""
    engine.lossy = {"ngram"}
    p = plan(repeats=1, warmup=0, temperatures=(0.0, 1.0), resident=resident)
    measure.measure(p, tmp_path)
    judged = ["drafter", "ngram", "by target", "by target"]
    assert engine.checked == judged
    # one at a time, the target was up first and comes back to judge; up together, the failed arm is not asked for those cells
    assert engine.started == ["target", "drafter", "ngram", *([] if resident else ["target"])]
    assert engine.order.count("ngram") == (5 if resident else 10)
    rows = [r for r in write(p, tmp_path) if r["group"] is None]
    assert {(r["arm"], r["temperature"]): (r["void"] or "")[:32] for r in rows} == {
        ("target", 0.0): "", ("drafter", 0.0): "", ("ngram", 0.0): "",
        ("target", 1.0): "", ("drafter", 1.0): "", ("ngram", 1.0): "not lossless at temperature 1: o",
    }  # fmt: skip
    sound, lossy = (next(r for r in rows if r["temperature"] and r["arm"] == name) for name in ("drafter", "ngram"))
    assert sound["losslessness"]["passed"]
    assert sound["losslessness"]["tokens"] == 48 * 7
    assert sound["losslessness"]["limit"] == 0.005  # two arms share the one in a hundred
    assert sound["speedup"] > 1
    assert lossy["speedup"] is None
    assert lossy["losslessness"]["p"] < 1e-20
    measure.measure(p, tmp_path)
    assert engine.checked == judged


def test_draws_left_unjudged_by_a_kill_are_judged_on_resuming(engine: Engine, tmp_path: Path) -> None:
    p = plan(repeats=1, warmup=0, temperatures=(1.0,))
    measure.measure(p, tmp_path)
    (tmp_path / "losslessness.jsonl").unlink()
    assert all("not checked" in r["void"] for r in write(p, tmp_path) if r["arm"] != "target")
    measure.measure(p, tmp_path)
    assert engine.checked == ["drafter", "ngram", *["by target"] * 4]
    assert {r["void"] for r in write(p, tmp_path)} == {None}


def test_no_further_repeat_when_the_time_is_used_up(engine: Engine, tmp_path: Path) -> None:
    p = plan(minutes=0.0, repeats=3)
    measure.measure(p, tmp_path)
    assert {r["repeat"] for r in read_jsonl(tmp_path / "requests.jsonl")} == {0}


def noisy(engine: Engine, monkeypatch: pytest.MonkeyPatch, quiet_after: int) -> None:
    """The drafter takes 1 to 3 times as long, by prompt and repeat; after so many answers always twice."""

    def complete(url: str, *rest: Any, **more: Any) -> list[client.Answer]:
        answers, n = engine.complete(url, *rest, **more), engine.order.count(url)
        if url != "drafter":
            return answers
        factor = 2.0 if n > quiet_after else 1.0 + (n % 5) / 2
        return [replace(a, arrivals=[(t * factor, k) for t, k in a.arrivals]) for a in answers]

    monkeypatch.setattr(client, "complete", complete)


@pytest.mark.parametrize("resident", [True, False])
def test_repeats_go_on_until_the_interval_is_as_narrow_as_asked(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    """Five prompts that differ by up to threefold in repeat 0 and not at all later: the means over repeats draw together."""
    noisy(engine, monkeypatch, quiet_after=5)
    asked = plan(repeats=9, warmup=0, precision=0.1, resident=resident)
    measure.measure(asked, tmp_path)
    row = cell(write(asked, tmp_path), "drafter")
    low, high = row["speedup_interval"]
    assert row["speedup_half_width"] == pytest.approx((high - low) / 2 / row["speedup"])
    assert 1 < row["repeats"] < 9
    assert row["speedup_half_width"] <= 0.1
    assert (row["precision"], row["precision_reached"]) == (0.1, True)
    assert {r["repeat"] for r in read_jsonl(tmp_path / "requests.jsonl")} == set(range(row["repeats"]))
    before, engine.order = row["repeats"], []
    measure.measure(asked, tmp_path)  # whole: no further repeat
    assert engine.order == []
    engine.order = []
    fewer = replace(asked, repeats=before - 1)
    measure.measure(fewer, tmp_path / "fewer")
    row = cell(write(fewer, tmp_path / "fewer"), "drafter")
    assert (row["repeats"], row["precision_reached"]) == (before - 1, False)


def test_a_repeat_that_was_begun_is_finished_before_precision_is_asked_for(engine: Engine, tmp_path: Path) -> None:
    p = plan(warmup=0, precision=0.5, repeats=3)  # reached at once: no answer differs in time
    measure.measure(plan(warmup=0, repeats=2), tmp_path)
    rows = read_jsonl(tmp_path / "blocks.jsonl")
    (tmp_path / "blocks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:9]))  # half of repeat 1
    measure.measure(p, tmp_path)
    assert [r["repeat"] for r in read_jsonl(tmp_path / "requests.jsonl")].count(1) == 15
    assert {r["repeat"] for r in read_jsonl(tmp_path / "requests.jsonl")} == {0, 1}


def test_the_target_again_is_an_arm_whose_speedup_is_noise(engine: Engine, tmp_path: Path) -> None:
    p = plan(warmup=0)
    p = replace(p, arms=[p.arms[0], Arm(measure.AGAIN, "target"), *p.arms[1:]])
    measure.measure(p, tmp_path)
    again = cell(write(p, tmp_path), measure.AGAIN)
    assert (again["speedup"], again["exact_match"], again["acceptance_length"]) == (1.0, 1.0, None)
    assert again["speedup_interval"] == [1.0, 1.0]


def test_an_arm_served_in_another_precision_is_void(engine: Engine, tmp_path: Path) -> None:
    """And what else its server did otherwise is told: vLLM's own words of both logs."""
    p = plan(repeats=1, warmup=0)
    line = "Initializing a V1 LLM engine (v0.32.0) with config: model='m', skip_tokenizer_init=False, dtype=torch.{}, "
    line += "enforce_eager=True\n"
    (tmp_path / "logs").mkdir()
    for arm, dtype in (("target", "float32"), ("drafter", "bfloat16"), ("ngram", "float32")):
        (tmp_path / "logs" / f"{arm}.log").write_text("non-default args: {}\n" + line.format(dtype))
    with open(tmp_path / "logs" / "ngram.log", "a") as log:
        log.write("Async scheduling not supported with ngram-based speculative decoding and will be disabled.\n")
    measure.measure(p, tmp_path)
    rows = write(p, tmp_path)
    assert (
        cell(rows, "drafter")["void"] == "served otherwise than the target alone: dtype bfloat16, the target's float32"
    )
    ngram = cell(rows, "ngram")
    assert ngram["void"] is None
    assert ngram["settings"]["differs"] == ["scheduling synchronous, the target's unknown"]
    assert ngram["settings"]["effective"]["eager"] == "True"
    assert ngram["settings"]["effective"]["attention"] == "unknown"
    (tmp_path / "cpu.log").write_text(line.format("float32, device_config=cpu"))
    (tmp_path / "cuda.log").write_text(line.format("float32, device_config=cuda"))
    told = [effective.read(tmp_path / f"{device}.log")["scheduling"] for device in ("cpu", "cuda")]
    assert told == ["synchronous", "unknown"]  # the CPU back end has no other and does not say so


def test_speculation_words() -> None:
    assert Arm("target", "target").speculation() is None
    assert Arm("d", "draft_model", Path("x"), 3).speculation() == {
        "method": "draft_model", "model": "x", "num_speculative_tokens": 3,
    }  # fmt: skip
    by_size = Arm("d", "draft_model", Path("x"), 3, schedule=((1, 1, 3), (2, 8, 0))).speculation() or {}
    assert by_size["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 8, 0]]
    words = server.serve_words("t", {"method": "ngram"}, server.Settings(), 1)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "ngram"}
    assert "--no-enable-prefix-caching" in words  # D20
    assert words[words.index("--generation-config") + 1] == "vllm"  # D23: requests alone say how to sample
