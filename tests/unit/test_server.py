"""What eval/server.py does around a server's process, with stand-ins for it (no engine runs here)."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval import client, server
from pairing.errors import PartFailedError


def test_the_users_api_key_is_not_handed_to_a_server_that_our_client_talks_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would guard /v1 with it and refuse every request. `draftsmith serve` keeps it: its clients are the user's."""
    handed: list[dict[str, str]] = []

    def popen(words: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        handed.append(env)
        return SimpleNamespace(pid=0)

    monkeypatch.setattr(server.subprocess, "Popen", popen)
    monkeypatch.setenv("VLLM_API_KEY", "vk_secretsecret")
    monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", "1")
    server.start("a", tmp_path, None, server.Settings(), tmp_path / "log")
    server.start("a", tmp_path, None, server.Settings(), tmp_path / "log", keep_key=True)
    assert ["VLLM_API_KEY" in env for env in handed] == [False, True]
    assert [env["VLLM_CPU_SGL_KERNEL"] for env in handed] == ["1", "1"]  # the user's other settings go on to it
    assert os.environ["VLLM_API_KEY"] == "vk_secretsecret"


def test_servers_that_start_side_by_side_get_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system hands a port out again as long as nobody has bound it, and vLLM shares a port (SO_REUSEPORT)."""
    offered = iter([70001, 70001, 70001, 70002])  # no real ports

    class Socket:
        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def bind(self, address: tuple[str, int]) -> None:
            assert address == ("127.0.0.1", 0)

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(offered)

    monkeypatch.setattr(server.socket, "socket", Socket)
    assert [server.free_port(), server.free_port()] == [70001, 70002]


def test_a_server_that_lost_its_port_is_not_measured_as_whoever_answers_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("INFO starting\nOSError: [Errno 98] Address already in use\n")
    monkeypatch.setattr(client, "health", lambda url: 200)
    gone: Any = SimpleNamespace(poll=lambda: 1, returncode=1)
    with pytest.raises(
        PartFailedError, match=r"arm b ended with code 1 at start: OSError: .Errno 98. Address already in"
    ):
        server.wait_until_ready(server.Server("b", "http://127.0.0.1:1", gone, log), 1, 0.0)
    up: Any = SimpleNamespace(poll=lambda: None)
    server.wait_until_ready(one := server.Server("b", "http://127.0.0.1:1", up, log), 1, 0.0)
    assert one.startup_s
