"""`sweep` against a scripted stand-in for server and client (no engine runs here) whose speeds are known by a formula.

A token of the target takes 0.1 s at any load. A round of K drafts accepts the first 3 at most and takes 1 + 0.1·K·c target
steps with c requests in flight: drafting pays for few requests and loses for many. tests/integration/test_sweep.py has vLLM.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from eval import client, report, schedule, server
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json, read_jsonl, write_json
from pairing.mask_token import with_mask
from pairing.pair import new_pair, read_pair, update_pair
from pairing.source import resolve
from recipes import serve, sweep
from recipes.config import parse
from tests import fake_engine, tiny
from tests.stored_answers import made_up, store

TOKENS = 13
ACCEPTED = 3
PROMPTS = 8


class Engine:
    def __init__(self) -> None:
        self.honours = True
        self.noise = 0.0  # of K = 2: every second prompt is slower by so much, every other faster
        self.dies_at: tuple[str, int] | None = None  # (arm, requests in flight)
        self.stops_after: int | None = None  # calls that are answered before a Ctrl-C
        self.cost = 0.1
        self.slower: dict[str, float] = {}  # by arm: of each step
        self.idle = 0.0  # of a step, for a drafter that is loaded and asked for no draft
        self.started: list[str] = []
        self.calls = 0
        self.count: dict[str, Counter[str]] = {}
        self.words: dict[str, dict[str, Any]] = {}

    def start(self, arm: str, target: Path, speculation: Any, settings: Any, log: Path) -> server.Server:
        self.started.append(arm)
        self.count[arm], self.words[arm] = Counter(), speculation or {}
        return fake_engine.started(arm, log)

    def complete(
        self,
        url: str,
        model: str,
        prompts: list[list[int]],
        sampling: Any,
        timeout_s: float,
        in_flight: int = 1,
        arrivals: None = None,
    ) -> list[client.Answer]:
        self.calls += 1
        if self.calls == self.stops_after:
            raise KeyboardInterrupt
        if self.dies_at == (url, in_flight):
            raise PartFailedError(f"{url}: the server broke off")
        k = self.words[url].get("num_speculative_tokens", 0)
        planned = self.words[url].get("num_speculative_tokens_per_batch_size")
        if planned and self.honours:
            k = schedule.k_at(planned, in_flight)
        accepted = min(k, ACCEPTED)
        rounds = ceil((TOKENS - 1) / (1 + accepted))  # the prompt brings the first token
        self.count[url] += Counter(
            tokens=TOKENS * len(prompts), drafts=rounds * len(prompts) * bool(k), drafted=rounds * k * len(prompts),
            accepted=rounds * accepted * len(prompts),
        )  # fmt: skip
        answers = []
        for i, _ in enumerate(prompts):
            idle = self.idle * (planned is not None and not k)
            step = 0.1 * (1 + self.cost * k * in_flight + idle) * (1 + (self.noise if k == 2 else 0) * (-1) ** i)
            step *= self.slower.get(url, 1)
            at, held = [(0.1, 1)], 1
            while held < TOKENS:
                new = min(1 + accepted, TOKENS - held)
                held += new
                at.append((at[-1][0] + step, new))
            answers.append(client.Answer(list(range(5, 5 + TOKENS)), at, TOKENS, "length", 0.0))
        return answers

    def metrics(self, url: str) -> str:
        n = self.count[url]
        return fake_engine.metrics(n["tokens"], (n["drafts"], n["drafted"], n["accepted"]) if self.words[url] else ())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    fake_engine.install(monkeypatch, fake)
    return fake


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and the answers that it is said to have given."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.folder(folder / "target")
    store(folder / "answers", made_up([TOKENS] * PROMPTS), target)
    return target, folder / "answers"


@pytest.fixture
def drafter(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    folder = tiny.folder(tmp_path / "drafter", layers=1)
    write_json(folder / "pair.json", new_pair(resolve(str(pair[0])), {"step": "init"}))
    return folder


def words(pair: tuple[Path, Path], drafter: Path, out: Path, **over: Any) -> list[str]:
    keys = {
        "target": pair[0], "drafter": drafter, "workloads.orders.answers": pair[1], "workloads.orders.max_tokens": 16,
        "out": out, "num_speculative_tokens": "[1, 2, 4]", "concurrencies": "[1, 4, 16]", "warmup": 0, "max_model_len": 256,
        "aa": "false",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in {**keys, **over}.items()]


def speed(k: int, c: int) -> float:
    """Of one answer of TOKENS tokens over the target's, the first token included."""
    rounds = ceil((TOKENS - 1) / (1 + min(k, ACCEPTED)))
    return TOKENS * 0.1 / (0.1 + rounds * 0.1 * (1 + 0.1 * k * c))


def test_from_cells_to_a_schedule_served_and_recorded(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: at 1 in flight K = 4 is best (2.50x), at 4 K = 2 (1.59x), at 16 none pays; 2-3 and 5-15 are gaps."""
    out = tmp_path / "out"
    assert sweep.main([*words(pair, drafter, out, max_num_seqs=32), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == read_json(out / "sweep.json")
    cells = {(c["num_speculative_tokens"], c["concurrency"]): c for c in found["surface"]}
    for (k, c), one in cells.items():
        assert one["void"] is None
        if k:
            assert one["speedup"] == pytest.approx(speed(k, c))
            assert (one["drafted_per_round"], one["acceptance_length"]) == (k, 1 + min(k, ACCEPTED))
    best = {1: 4, 4: 2, 16: 0}
    assert [round(speed(best[c], c), 2) for c in (1, 4)] == [2.5, 1.59]
    assert {b["concurrency"]: b["num_speculative_tokens"] for b in found["best"]} == best
    assert (found["pays_up_to"], found["stops_at"], found["answer"]) == (4, 16, "schedule")
    assert found["schedule"] == [[1, 1, 4], [2, 4, 2], [5, 32, 0]]
    assert any("sizes 17 to 32 were not measured: K = 0" in note for note in found["notes"])
    for c in found["confirmed"]:
        k = best[c["concurrency"]]
        assert c["speedup"] == pytest.approx(speed(k, c["concurrency"]) if k else 1.0)
        assert (c["asked"], c["drafted_per_round"], c["ignored"]) == (k, k, None if c["concurrency"] == 1 else False)
        assert c["over_fixed"] == pytest.approx(c["speedup"] / speed(found["fixed"], c["concurrency"]))
    assert engine.started.count("drafter-k4") >= 2  # a server of its own for every repeat
    assert len(read_jsonl(out / "results.jsonl")) == 12

    own = read_pair(drafter)["serve"]
    assert own["num_speculative_tokens_per_batch_size"] == found["schedule"]
    assert serve.main([str(drafter), "max_num_seqs=64", "max_model_len=256", "--dry-run"]) == 0
    line = shlex.split(capsys.readouterr().out)
    asked = json.loads(line[line.index("--speculative-config") + 1])
    assert asked["num_speculative_tokens_per_batch_size"] == [*found["schedule"], [33, 64, 0]]
    assert asked["num_speculative_tokens"] == 4
    assert (
        serve.main([str(drafter), "num_speculative_tokens=2", "max_model_len=256", "--dry-run"]) == 0
    )  # asked for by hand
    assert "per_batch_size" not in capsys.readouterr().out

    page = report.build(out)
    assert "Where speculation pays" in page
    assert "Up to 4 requests in flight, no longer at 16." in page
    engine.calls = 0
    assert sweep.main(words(pair, drafter, out, max_num_seqs=32)) == 0  # whole: nothing is served again
    assert engine.calls == 0
    told = capsys.readouterr().out
    assert "pays up to 4 in flight, no longer at 16" in told
    assert f"schedule: {json.dumps(found['schedule'])}" in told


def test_an_engine_that_ignores_the_schedule_is_told_and_served_with_one_k(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.honours = False
    assert sweep.main([*words(pair, drafter, tmp_path / "out", concurrencies="[1, 4]"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["ignored"] for c in found["confirmed"] if c["arm"] == "schedule"] == [None, True]
    assert {c["arm"] for c in found["confirmed"]} == {"schedule", f"drafter-k{found['fixed']}"}
    assert any("ignores the schedule: it drafted 4.00 with 4 in flight (asked: 2)" in note for note in found["notes"])
    assert (found["answer"], found["serve"]["num_speculative_tokens_per_batch_size"]) == ("fixed", None)
    assert found["serve"]["num_speculative_tokens"] == found["fixed"]
    assert "per_batch_size" not in found["serve"]["command"]


def test_a_k_that_cannot_be_told_from_a_smaller_one_is_not_chosen(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.noise = 0.6
    asked = {"num_speculative_tokens": "[1, 2]", "concurrencies": "[4]"}
    assert sweep.main([*words(pair, drafter, tmp_path / "out", **asked), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"][0]["num_speculative_tokens"] == 1
    assert found["schedule"] == [[1, 4, 1]]
    assert (found["answer"], found["serve"]["num_speculative_tokens_per_batch_size"]) == ("fixed", None)


def test_where_nothing_pays_the_answer_is_no(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.cost = 2.0
    assert sweep.main([*words(pair, drafter, tmp_path / "out"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["answer"], found["schedule"], found["confirmed"]) == ("none", [[1, 16, 0]], [])
    assert read_pair(drafter)["serve"] is None


def test_a_cell_whose_server_dies_is_void_and_the_rest_is_measured(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.dies_at = ("drafter-k4", 1)
    assert sweep.main([*words(pair, drafter, tmp_path / "out", repeats=1), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    void = {(c["arm"], c["concurrency"]) for c in found["surface"] if c["void"]}
    assert void == {("drafter-k4", 1)}
    assert any(
        n.startswith("drafter-k4 with 1 in flight is void: drafter-k4: the server broke off") for n in found["notes"]
    )
    assert found["best"][0]["num_speculative_tokens"] == 2  # the best of those that were measured
    assert engine.started[:5] == ["target", "drafter-k1", "drafter-k2", "drafter-k4", "drafter-k4"]


def test_a_size_at_which_the_target_was_not_measured_counts_as_a_gap(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.dies_at = ("target", 4)
    assert sweep.main([*words(pair, drafter, tmp_path / "out"), "--json"]) == 1  # not confirmed there either
    found = json.loads(capsys.readouterr().out)
    assert [b["concurrency"] for b in found["best"]] == [1, 16]
    assert found["schedule"] == [[1, 1, 4], [2, 16, 0]]
    assert found["answer"] == "not confirmed"
    assert found["serve"] is None


def test_stopped_and_started_again_it_goes_on_with_the_cell(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(pair, drafter, tmp_path / "out", repeats=1)
    engine.stops_after = 6  # of 12 cells, then 9 of the confirmation
    with pytest.raises(KeyboardInterrupt):
        sweep.main(asked)
    engine.stops_after, engine.calls, engine.started = None, 0, []
    assert sweep.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["surface"]) == 12
    assert engine.started[0] == "drafter-k1"
    assert engine.calls == 12 - 5 + 3 * len({"target", "schedule", f"drafter-k{found['fixed']}"})


def test_both_ways_of_drawing_are_compared(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"draft_sample_methods": "[greedy, probabilistic]", "num_speculative_tokens": "[2]", "concurrencies": "[1]"}
    assert sweep.main([*words(pair, drafter, tmp_path / "out", **asked), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["arm"] for c in found["surface"]] == ["target", "drafter-k2", "drafter-probabilistic-k2"]
    assert found["mode"] == "drafter"  # alike: the one that was named first


@pytest.mark.parametrize(
    ("ways", "modes"),
    [("both", ["drafter", "drafter-parallel"]), ("only", ["drafter-parallel"]), ("off", ["drafter"])],
)
def test_ways_of_drafting_are_compared(
    ways: str, modes: list[str], engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    parallel(drafter)
    asked = {"parallel_drafting": ways, "num_speculative_tokens": "[2]", "concurrencies": "[1]"}
    assert sweep.main([*words(pair, drafter, tmp_path / "out", **asked), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["arm"] for c in found["surface"]] == ["target", *(f"{mode}-k2" for mode in modes)]
    drafted = {arm: bool(said.get("parallel_drafting")) for arm, said in engine.words.items() if arm != "target"}
    assert drafted == {f"{mode}-k2": mode.endswith("parallel") for mode in modes}


def parallel(drafter: Path) -> None:
    config = drafter / "config.json"
    write_json(config, with_mask(read_json(config), tiny.REAL_TOKENS))


def test_with_all_drafts_in_one_pass_the_schedule_has_one_k(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by one K = 4 is best at 1 and K = 2 at 4; one pass can't draft fewer than it was started for: K = 2 at both."""
    parallel(drafter)
    update_pair(drafter, parallel_drafting={"num_speculative_tokens": 2})
    out = tmp_path / "out"
    assert sweep.main([*words(pair, drafter, out, parallel_drafting="only"), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    warned = "drafter-parallel-k4: num_speculative_tokens is 4, the drafter was trained to draft 2 in one pass: "
    assert said.err.count("trained to draft") == said.err.count(warned) == 1
    assert any(note.startswith(warned) for note in found["notes"])
    assert {b["concurrency"]: b["num_speculative_tokens"] for b in found["best"]} == {1: 2, 4: 2, 16: 0}
    assert (found["fixed"], found["schedule"], found["answer"]) == (2, [[1, 4, 2], [5, 16, 0]], "schedule")
    assert engine.words["schedule"]["parallel_drafting"] is True
    assert read_pair(drafter)["serve"]["num_speculative_tokens_per_batch_size"] == found["schedule"]
    assert (
        serve.main([str(drafter), "max_num_seqs=16", "max_model_len=256", "--dry-run"]) == 0
    )  # pre-flight lets it pass


def test_a_schedule_that_loses_where_one_k_does_not_gives_way_to_it(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 8 in flight K = 2 is not measurably faster than none, so the schedule says 0; but a drafter at rest isn't free."""
    engine.idle, engine.noise = 0.2, 0.6
    asked = {"concurrencies": "[1, 8]", "num_speculative_tokens": "[2]"}
    out = tmp_path / "out"
    assert sweep.main([*words(pair, drafter, out, **asked), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tried"], found["schedule"]) == ([[1, 1, 2], [2, 8, 0]], [[1, 8, 2]])
    assert "Batch sizes 2 to 7 were not measured: K = 2, as at every size." in found["notes"]
    assert (found["answer"], found["serve"]["num_speculative_tokens_per_batch_size"]) == ("fixed", None)
    assert any("schedule with 8 in flight is slower than the target alone (0.8" in note for note in found["notes"])
    assert "K = 2 at every batch size is slower nowhere: serve that." in found["notes"]
    assert [c["arm"] for c in found["confirmed"]] == ["schedule", "schedule", "drafter-k2", "drafter-k2"]
    assert "Deploy the drafter with K = 2 at every batch size" in report.build(out)


def test_the_target_served_again_shows_what_the_machine_did(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second target's tokens take a quarter longer: 0.8x, told as noise and nowhere taken for a way of drafting."""
    engine.slower = {"target-again": 1.25}
    asked = {"aa": "true", "repeats": 1, "concurrencies": "[1, 4]", "num_speculative_tokens": "[2]"}
    assert sweep.main([*words(pair, drafter, tmp_path / "out", **asked), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert engine.started == ["target", "drafter-k2", "target-again", "target", "drafter-k2"]  # the last two confirm
    assert [(c["concurrency"], round(c["speedup"], 2)) for c in found["again"]] == [(1, 0.81), (4, 0.81)]
    assert {c["arm"] for c in found["surface"]} == {"target", "drafter-k2"}
    assert [b["num_speculative_tokens"] for b in found["best"]] == [2, 2]
    assert any("served a second time, has 0.81x with 1 in flight, 0.81x with 4 in flight" in n for n in found["notes"])
    assert "served a second time, has 0.81x with 1 in flight" in report.build(tmp_path / "out")


def test_the_plan_before_anything_starts(
    engine: Engine, pair: tuple[Path, Path], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main([*words(pair, drafter, tmp_path / "out"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "cells: 12 (4 arms x 3 concurrencies)" in told
    assert f"requests: {PROMPTS * 12 * 2}, at most {PROMPTS * 12 * 2 * 16} tokens" in told
    assert engine.started == []
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="max_num_seqs is 8: of 16 requests in flight the rest would queue"):
        sweep.main([*words(pair, drafter, tmp_path / "out", max_num_seqs=8), "--dry-run"])
    with pytest.raises(InputError, match=r"num_speculative_tokens\.1: input should be less than or equal to 32"):
        parse(sweep.SweepConfig, words(pair, drafter, tmp_path, num_speculative_tokens="[1, 33]"))
