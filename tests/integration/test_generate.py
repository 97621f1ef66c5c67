"""Real engines: vLLM and transformers record the same, kill -9 loses nothing, and no engine outlives its command.

Two vLLM starts in all: one in a command that is killed, one in this process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from distill.answers import open_answers, shard_paths
from distill.generate import SHARD_PROMPTS, Job, generate, open_target, unanswered
from distill.prompts import prompt
from distill.requests import Answerer, Sampling, tokenize
from pairing.errors import PartFailedError
from pairing.files import read_json
from pairing.source import load_tokenizer, resolve
from recipes.config import parse
from recipes.generate import GenerateConfig, plan
from tests import tiny
from tests.conftest import ROOT

COUNT = 160


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second ending id that answers reach now and then, so that both kinds of ends occur."""
    path = tiny.folder(tmp_path_factory.mktemp("target") / "tiny", seed=3)
    config = read_json(path / "generation_config.json")
    (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, 113, 120]}))
    return path


@pytest.fixture(scope="module")
def words(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of two sets with the same prompts: one will be stopped and resumed, the other answered in one go."""
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} " + "word " * (i % 7)}) + "\n" for i in range(COUNT)))
    sets = [f"sets.{name}.{word}" for name in ("stopped", "whole") for word in (f"prompts={prompts}", "max_tokens=96")]
    return [f"target={target}", f"out={folder / 'data'}", "top_logprobs=8", "max_num_seqs=8", "backend=vllm", *sets]


def engines_of(pid: int) -> list[int]:
    """vLLM's processes below `pid`."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()[1:]]
    family, before = {pid}, 0
    while len(family) > before:
        before = len(family)
        family |= {int(child) for child, parent, _ in rows if int(parent) in family}
    return [int(child) for child, _, args in rows if int(child) in family and args.startswith("VLLM::")]


def wait_for(what: Any, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def killed(words: list[str]) -> int:
    """Runs the command, launched by path from another folder, and kills it with -9 in the middle of its first set.

    Returns how many prompts it had answered by then.
    """
    out = Path(words[1].removeprefix("out="))
    command = subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / "generate.py"), *words],
        cwd=out.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: command.poll() is not None or len(shard_paths(out / "stopped")) >= 2)
        family = engines_of(command.pid)
        assert command.poll() is None, (out / "logs" / "vllm.log").read_text()[-3000:]
        assert family
    finally:
        command.send_signal(signal.SIGKILL)
        printed, _ = command.communicate()
    assert printed == ""  # vLLM's chatter is in its log, standard output is for the result
    wait_for(lambda: not any(alive(pid) for pid in family), 20)
    assert "EngineCore" in (out / "logs" / "vllm.log").read_text()
    return SHARD_PROMPTS * len(shard_paths(out / "stopped"))


@pytest.fixture(scope="module")
def jobs(words: list[str], killed: int) -> list[Job]:
    config, _ = parse(GenerateConfig, words)
    return plan(config, resolve(config.target), Console(stderr=True))


@pytest.fixture(scope="module")
def in_vllm(target: Path, jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    with open_target("vllm", resolve(str(target)), context=256, top_logprobs=8, max_num_seqs=8, log=log) as answer:
        yield answer


def same(one: list[dict[str, Any]], other: list[dict[str, Any]], count: int = COUNT) -> None:
    """Same answers and same ends; heads equal up to float16's rounding; tails up to float32's."""
    assert len(one) == len(other) == count
    for a, b in zip(one, other, strict=True):
        for key in ("id", "messages", "input_ids", "spans", "finish_reason"):
            assert a[key] == b[key], key
        p, q = (np.array(row["head_logprobs"]).reshape(-1, 8) for row in (a, b))
        np.testing.assert_allclose(p, q, rtol=2e-3)
        np.testing.assert_allclose(a["tail_mass"], b["tail_mass"], atol=2e-5)
        # where two tokens are equally likely up to rounding, their order is free
        differ = np.array(a["head_ids"]).reshape(-1, 8) != np.array(b["head_ids"]).reshape(-1, 8)
        assert differ.mean() < 0.05
        for row, column in zip(*np.nonzero(differ), strict=True):
            near = np.abs(p[row] - p[row, column]) < 4e-3
            assert near.sum() > 1 or column == 7


def test_resumed_after_kill_9_like_never_stopped(killed: int, jobs: list[Job], in_vllm: Answerer) -> None:
    stopped, whole = jobs
    assert 64 <= killed < COUNT
    todo = unanswered(stopped)
    assert len(todo) == COUNT - killed  # nothing of a whole shard is asked again, nothing is forgotten
    stats = generate(stopped, todo, in_vllm)
    generate(whole, unanswered(whole), in_vllm)
    rows = [open_answers(job.folder).data.to_list() for job in jobs]
    same(*rows)
    assert stats["prompts"] == COUNT
    ends = [row["finish_reason"] for row in rows[0]]
    assert min(ends.count("stop"), ends.count("length")) > COUNT * 0.05


def test_vllm_and_transformers_record_the_same(
    target: Path, jobs: list[Job], tmp_path: Path, in_vllm: Answerer
) -> None:
    """Same greedy ids, same ends with the ending token (D23), same heads: the two back ends are one data format."""
    whole = jobs[1]
    generate(whole, unanswered(whole), in_vllm)
    other = Job("a", tmp_path / "a", whole.requests, whole.sampling, {**whole.meta, "backend": "transformers"})
    with open_target(
        "transformers", resolve(str(target)), context=256, top_logprobs=8, max_num_seqs=32, log=tmp_path / "log"
    ) as answer:
        generate(other, unanswered(other), answer)
    same(open_answers(whole.folder).data.to_list(), open_answers(other.folder).data.to_list())


def test_several_turns_in_vllm_and_in_transformers(target: Path, tmp_path: Path, in_vllm: Answerer) -> None:
    """Later turns go in while other chats are still being answered; rows are the same in both."""
    words = load_tokenizer(target)
    chats = [prompt([{"role": "user", "content": f"{i} {n}"} for n in range(1 + i % 3)]) for i in range(24)]
    requests = tokenize(chats, words, "tiny", every_turn=True)
    sampling = Sampling(max_tokens=16, temperature=0.0, top_logprobs=8, seed=0)
    one, other = (Job(name, tmp_path / name, requests, sampling, {"top_logprobs": 8}) for name in "ab")
    generate(one, unanswered(one), in_vllm, words, 256)
    with open_target(
        "transformers", resolve(str(target)), context=256, top_logprobs=8, max_num_seqs=32, log=tmp_path / "log"
    ) as answer:
        generate(other, unanswered(other), answer, words, 256)
    found = open_answers(one.folder)
    assert found.meta["stats"]["answers"] == 8 * (1 + 2 + 3)
    same(found.data.to_list(), open_answers(other.folder).data.to_list(), len(found.data))


def test_draws_follow_their_seeds_and_not_the_batch(jobs: list[Job], tmp_path: Path, in_vllm: Answerer) -> None:
    """At temperature 1 the token drawn may be outside the head; heads stay those of the untouched distribution."""
    one = jobs[1]
    hot = type(one.sampling)(max_tokens=12, temperature=1.0, top_logprobs=8, seed=5)
    runs = []
    for name, requests in (("a", one.requests[:40]), ("b", one.requests[:40][::-1])):
        job = Job(name, tmp_path / name, requests, hot, {"top_logprobs": 8})
        generate(job, unanswered(job), in_vllm)
        runs.append(open_answers(job.folder).data.to_list())
    assert [row["input_ids"] for row in runs[0]] == [row["input_ids"] for row in runs[1]]
    heads = np.concatenate([np.array(row["head_ids"]).reshape(-1, 8) for row in runs[0]])
    drawn = np.concatenate([row["input_ids"][row["spans"][0] :] for row in runs[0]])
    inside = (heads == drawn[:, None]).any(1)
    tails = np.concatenate([row["tail_mass"] for row in runs[0]])
    # drawn from the very distribution that is recorded: outside the head as often as its tail says (4 sigma)
    assert abs((~inside).mean() - tails.mean()) < 4 * np.sqrt(tails.mean() * (1 - tails.mean()) / len(tails))


def test_engine_that_dies_leaves_what_was_finished(jobs: list[Job], tmp_path: Path, in_vllm: Answerer) -> None:
    """Last in this module: it kills the engine."""
    one = jobs[1]
    job = Job("a", tmp_path / "a", one.requests, one.sampling, {"top_logprobs": 8})

    def until_killed(requests: Any, sampling: Any) -> Iterator[Any]:
        for count, answer in enumerate(in_vllm(requests, sampling)):
            yield answer
            if count == 40:
                for pid in engines_of(os.getpid()):
                    with suppress(ProcessLookupError):  # they end each other
                        os.kill(pid, signal.SIGKILL)

    with pytest.raises(PartFailedError, match=r"vLLM's engine died; finished prompts are kept, .* its log: "):
        generate(job, unanswered(job), until_killed)
    assert 41 <= COUNT - len(unanswered(job)) < COUNT
