"""Real vLLM on loopback: arms with a known answer, and nothing left behind however we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from eval import client, measure, results, server
from eval.measure import Arm, Plan, Request
from pairing.errors import PartFailedError
from pairing.files import read_jsonl
from tests import tiny

SETTINGS = server.Settings(dtype="float32", max_model_len=256, enforce_eager=True)
K = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("target"), layers=2)


def requests(count: int) -> list[Request]:
    encode = tiny.tokenizer()
    texts = [f"{word} and {word} again" for word in ("red", "green", "blue", "grey", "pink")][:count]
    return [Request(text, encode(text).input_ids, 24, None) for text in texts]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every process that a test starts is gone when it ends."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert [p for p in psutil.Process().children(recursive=True) if p.pid not in before] == []


def test_the_target_as_its_own_drafter_has_every_draft_accepted(target: Path, tmp_path: Path) -> None:
    """D15, D22, D23: rate 1 and τ = K + 1 whatever the prompts; at temperature 0 all arms write the target's own tokens.

    At temperature 1 drafts drawn from q = p are always accepted. On the CPU back end of vLLM 0.32 that holds only with
    our plugin's mend: without it they are verified at uninitialised temperatures, and τ falls to about 1.
    """
    arms = [
        Arm("target", "target"),
        Arm("self", "draft_model", target, K, "probabilistic"),
        Arm("ngram", "ngram", None, K),
    ]
    plan = Plan(target, arms, {"words": requests(4)}, SETTINGS, temperatures=(0.0, 1.0), concurrencies=(1, 2))
    measure.measure(plan, tmp_path)
    rows = results.write_results(plan, tmp_path, {}, {}, {}, {})
    assert {r["void"] for r in rows} == {None}
    for row in (r for r in rows if r["arm"] == "self"):
        assert row["acceptance_length"] == pytest.approx(K + 1, abs=0.1 if row["temperature"] else 0), row
        assert row["draft_acceptance_rate"] == pytest.approx(1.0, abs=0.05 if row["temperature"] else 0), row
    greedy = {r["arm"]: r for r in rows if r["temperature"] == 0 and r["concurrency"] == 1}
    assert greedy["self"]["survival_per_pos"] == [1.0] * K
    assert (greedy["self"]["exact_match"], greedy["ngram"]["exact_match"]) == (1.0, 1.0)
    assert greedy["self"]["output_tokens"] == greedy["target"]["output_tokens"] > 0
    assert not greedy["self"]["prefix_cache_hit_rate"]  # D20
    low, high = greedy["self"]["speedup_interval"]
    assert low < greedy["self"]["speedup"] < high
    assert all(len(r["output_ids"]) == r["output_tokens"] for r in read_jsonl(tmp_path / "requests.jsonl"))


CHILD = """
import sys, time
from pathlib import Path
from eval import server
one = server.start("target", Path(sys.argv[1]), None, server.Settings(dtype="float32", max_model_len=128,
                   enforce_eager=True), Path(sys.argv[2]))
server.wait_until_ready(one, 300, time.monotonic())
print("ready", flush=True)
time.sleep(600)
"""


def test_kill_9_leaves_no_engine_and_no_port(target: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(target), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    below = psutil.Process(child.pid).children(recursive=True)
    assert len(below) >= 2  # the front end and its engine
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below):
        time.sleep(0.2)
    assert [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_an_engine_that_is_gone_is_noticed_though_its_server_listens_on(target: Path, tmp_path: Path) -> None:
    """What the system does when memory runs out. The server process stays, so its end is not what tells."""
    one = server.start("target", target, None, SETTINGS, tmp_path / "log")
    try:
        server.wait_until_ready(one, 300, time.monotonic())
        children = psutil.Process(one.process.pid).children(recursive=True)
        worker = next(p for p in children if "Worker" in p.name() or "Worker" in " ".join(p.cmdline()))
        worker.kill()
        until = time.monotonic() + 60
        while client.health(one.url) == 200 and time.monotonic() < until:
            time.sleep(0.5)
        assert one.process.poll() is None
        with pytest.raises(PartFailedError, match=r"the engine of vLLM for arm target is gone: .*when memory runs out"):
            server.wait_until_ready(one, 300, time.monotonic())
    finally:
        server.stop(one)


def test_a_server_that_cannot_start_names_the_reason_and_leaves_nothing(target: Path, tmp_path: Path) -> None:
    """D8 kind: vLLM's own reason, not a bare exit code."""
    other = Arm("other", "draft_model", tiny.folder(tmp_path / "other", rows=tiny.ROWS + 16), K)
    one = server.start("other", target, other.speculation(), SETTINGS, tmp_path / "log")
    with pytest.raises(PartFailedError, match=r"arm other ended with code 1 at start: .*vocab"), server.serving([one]):
        pass
