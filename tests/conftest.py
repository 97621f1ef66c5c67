"""Tests reach no network: the hub client is offline, trackers too, before anything imports them."""

import os
from pathlib import Path

import hypothesis
import pytest

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
)

hypothesis.settings.register_profile("draftsmith", deadline=None)  # a busy machine is no failing example
hypothesis.settings.load_profile("draftsmith")

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker("slow")
