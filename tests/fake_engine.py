"""What scripted stand-ins for vLLM's servers and their client share (no engine runs here); each test scripts its answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval import client, server


def install(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """Puts the methods `start`, `complete` and `metrics` of `engine` in the place of those of eval.server and eval.client."""
    monkeypatch.setattr(server, "start", engine.start)
    monkeypatch.setattr(server, "stop", lambda one: None)
    monkeypatch.setattr(server, "wait_until_ready", lambda one, timeout_s, started: None)
    monkeypatch.setattr(server.Server, "memory_mib", lambda self: 100.0)
    monkeypatch.setattr(client, "complete", engine.complete)
    monkeypatch.setattr(client, "metrics", engine.metrics)


def started(arm: str, log: Path) -> server.Server:
    """A server without a process, whose address is the name of its arm."""
    return server.Server(arm, arm, None, log, 1.0, ["vllm", "serve", arm])  # type: ignore[arg-type]


def metrics(tokens: int, drafts: Sequence[int] = (), per_pos: Sequence[int] = ()) -> str:
    """/metrics with so many tokens, and of an arm that drafts its rounds, drafted and accepted tokens (`drafts`), and the
    accepted ones by position."""
    counts = {"generation_tokens_total": tokens}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    if drafts:
        counts |= {f"spec_decode_{name}_total": n for name, n in zip(names, drafts, strict=True)}
    lines = [f'vllm:{name}{{engine="0"}} {n}' for name, n in counts.items()]
    family = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{family}{{engine="0",position="{i}"}} {n}' for i, n in enumerate(per_pos)]
    return "\n".join(lines) + "\n"
