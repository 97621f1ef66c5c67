"""Texts made fit to publish: no folder of this machine stays in them, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pairing.portable import portable, roots_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vllm serve /w/proj/runs/x/t --port 8000", "vllm serve runs/x/t --port 8000"),
        ("/w/proj", "."),
        ("out=/elsewhere/run/data", "out=run/data"),
        ('{"model": "/elsewhere/run/drafter"}', '{"model": "run/drafter"}'),
        ("/any/.cache/huggingface/hub/models--Org--Name-1B/snapshots/0a1b2c", "Org/Name-1B"),
        ("(log: /opt/other/logs/a.log)", "(log: a.log)"),
        ("/w/project/x", "x"),
        ("tokens/s, http://127.0.0.1:80/a/b, 3/4", "tokens/s, http://127.0.0.1:80/a/b, 3/4"),
        ("POST /v1/completions", "POST /v1/completions"),
        ("runs/demo/drafter and </td>", "runs/demo/drafter and </td>"),
    ],
)  # fmt: skip
def test_texts(text: str, shown: str) -> None:
    assert portable(text, [("/w/proj", ""), ("/elsewhere/run", "run")]) == shown


def test_everything_within_is_reached_and_other_values_stay() -> None:
    held = {"/a/b/c": ["/a/b/d", 3, None, 1.5, True, ("/a/b/e",)]}
    assert portable(held, []) == {"c": ["d", 3, None, 1.5, True, ("e",)]}


def test_roots_are_the_working_directory_the_run_and_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roots = roots_of(Path("runs/demo"), "/old/place", "relative")
    assert roots[0] == (str(tmp_path), "")
    assert (str(tmp_path / "runs/demo"), "demo") in roots
    assert ("/old/place", "demo") in roots
    assert roots[-1] == (str(Path.home()), "~")
