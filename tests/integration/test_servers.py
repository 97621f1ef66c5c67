"""A real vLLM server, as `generate` sees it over HTTP: the same rows as in process, and what it refuses. One server start."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distill.generate as module
from distill import answers
from distill.answers import open_answers
from eval import server
from pairing.errors import InputError, PartFailedError
from recipes.generate import main
from tests import tiny

COUNT, K = 24, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("target") / "tiny", seed=3)


@pytest.fixture(scope="module")
def served(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    settings = server.Settings(dtype="float32", max_model_len=256, enforce_eager=True)
    one = server.start("target", target, None, settings, tmp_path_factory.mktemp("logs") / "vllm.log")
    with server.serving([one]) as (ready,):
        yield ready


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of them of two turns."""
    file, rows = tmp_path_factory.mktemp("asked") / "p.jsonl", []
    for i in range(COUNT):
        chat = [{"role": "user", "content": f"{i} " + "word " * (i % 5)}]
        more = [{"role": "assistant", "content": "left out"}, {"role": "user", "content": f"and {i}?"}]
        rows.append({"messages": [*chat, *more] if i % 2 else chat})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(target: Path, out: Path, asked: Path, *more: str) -> list[str]:
    return [f"target={target}", f"out={out}", f"top_logprobs={K}", f"sets.a.prompts={asked}", "sets.a.max_tokens=20",
            "max_model_len=256", *more]  # fmt: skip


def rows_of(out: Path) -> list[dict[str, Any]]:
    return list(open_answers(out / "a").data)


def test_a_server_gives_the_rows_of_transformers(
    target: Path, served: server.Server, asked: Path, tmp_path: Path
) -> None:
    """Same greedy ids and ends with the ending token, same heads, in both turns."""
    assert main(words(target, tmp_path / "a", asked, f"servers=[{served.url}]")) == 0
    assert main(words(target, tmp_path / "b", asked, "backend=transformers")) == 0
    ours, theirs = rows_of(tmp_path / "a"), rows_of(tmp_path / "b")
    assert len(ours) == len(theirs) >= COUNT
    assert sum(len(row["spans"]) // 2 for row in ours) == COUNT + COUNT // 2
    for a, b in zip(ours, theirs, strict=True):
        for key in ("id", "messages", "input_ids", "spans", "finish_reason"):
            assert a[key] == b[key], key
        np.testing.assert_allclose(a["head_logprobs"], b["head_logprobs"], rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(a["tail_mass"], b["tail_mass"], atol=2e-5)
        assert np.mean(np.array(a["head_ids"]) != np.array(b["head_ids"])) < 0.05  # equals up to rounding


def test_draws_are_of_the_distribution_that_is_recorded(
    target: Path, served: server.Server, asked: Path, tmp_path: Path
) -> None:
    """At temperature 1 the token drawn is outside the head as often as the tail says (4 sigma); a second run draws the same."""
    for name in ("a", "b"):
        assert main(words(target, tmp_path / name, asked, f"servers=[{served.url}]", "temperature=1")) == 0
    rows = rows_of(tmp_path / "a")
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in rows_of(tmp_path / "b")]
    outside, tails = [], []
    for row in rows:
        places = [t for s, e in zip(row["spans"][::2], row["spans"][1::2], strict=True) for t in range(s, e)]
        heads = np.array(row["head_ids"]).reshape(-1, K)
        outside += [row["input_ids"][t] not in heads[n] for n, t in enumerate(places)]
        tails += row["tail_mass"]
    mean = np.mean(tails)
    assert abs(np.mean(outside) - mean) < 4 * np.sqrt(mean * (1 - mean) / len(tails))
    assert mean > 0.02


def test_what_the_server_lacks_is_refused(target: Path, served: server.Server, asked: Path, tmp_path: Path) -> None:
    at = f"servers=[{served.url}]"
    with pytest.raises(InputError, match="fewer than top_logprobs=30 log-probs: start it with --max-logprobs 30"):
        main(words(target, tmp_path / "a", asked, at, "top_logprobs=30"))
    for path, kwargs, says in (
        ("other", {}, r"serves target \(from .*tiny\), not .*other"),
        ("tiny", {"swap": (60, 61)}, "another tokenizer"),
    ):
        wrong = tiny.folder(tmp_path / "models" / path, **kwargs)
        with pytest.raises(InputError, match=says):
            main(words(wrong, tmp_path / f"out-{path}", asked, at))
    with pytest.raises(InputError, match=r"set a on these servers: .* longer than the context of 256 tokens"):
        main([*words(target, tmp_path / "c", asked, at, "sets.a.max_tokens=250"), "max_model_len=512"])


def test_a_server_that_is_killed_leaves_what_was_finished(
    target: Path, served: server.Server, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last in this module: it kills the server, in the middle of a set, through the note that a shard was begun."""
    monkeypatch.setattr(module, "SHARD_PROMPTS", 4)
    real = answers.write_shard

    def killing(*args: Any) -> Path:
        os.killpg(served.process.pid, signal.SIGKILL)
        return real(*args)

    monkeypatch.setattr(module, "write_shard", killing)
    began = time.monotonic()
    more = ("per_server=4", "patience=2", "sets.a.max_tokens=100")
    with pytest.raises(PartFailedError, match=r"no server has answered for 2 s .*finished prompts are kept"):
        main(words(target, tmp_path / "a", asked, f"servers=[{served.url}]", *more))
    assert time.monotonic() - began < 60
    monkeypatch.setattr(module, "write_shard", real)
    held = answers.shard_paths(tmp_path / "a" / "a")
    assert held
