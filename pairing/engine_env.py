"""The environment that a vLLM engine started by us gets, on the CPU back end: every core this process may use."""

from __future__ import annotations

import os


def cpu_engine_env() -> dict[str, str]:
    """Defaults for vLLM's CPU back end; the user's own settings go before them.

    By default vLLM keeps one core back for its front end and uses one thread per physical core; on two cores that
    halves the speed.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
