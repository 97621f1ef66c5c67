"""`check` on a real pair: SmolLM2-135M with itself, with padded rows, with two ids exchanged, with another template."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pairing.alignment import check_pair
from pairing.repair import repair
from pairing.source import ModelSource, resolve
from pairing.weights import read_headers
from tests.unit.test_alignment import edit, found
from tests.unit.test_without_torch import alone, here

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def target() -> ModelSource:
    return resolve(NAME)


def copy(target: ModelSource, path: Path) -> ModelSource:
    """The folder again; its weights are links, as no test here changes them."""
    path.mkdir()
    for file in target.path.iterdir():
        (path / file.name).symlink_to(file) if file.suffix == ".safetensors" else shutil.copyfile(
            file, path / file.name
        )
    return resolve(str(path))


def test_with_itself(target: ModelSource) -> None:
    report = check_pair(target, target)
    assert report["aligned"]
    assert not [f for f in report["findings"] if f["level"] in ("blocks", "repairable")]
    assert report["facts"]["target_rows"] == 49152
    assert all(need["runs"] for user, need in report["needs"].items() if user != "universal")


def test_in_a_process_without_torch(target: ModelSource) -> None:
    pairs = [(NAME, str(target.path))]
    child, _ = alone(pairs)
    assert not child["torch"]
    assert child["reports"] == here(pairs)


def test_with_a_padded_copy_and_its_repair(target: ModelSource, tmp_path: Path) -> None:
    """D1: a target of 49216 rows is what the copy must be padded to; repaired, the pair is aligned."""
    padded = copy(target, tmp_path / "padded")
    edit(padded.path / "config.json", lambda v: v.update(vocab_size=49216))
    blocks = [f["what"] for f in check_pair(padded, target)["findings"] if f["level"] == "blocks"]
    assert any("embedding has 49152 rows, its config says vocab_size 49216" in what for what in blocks)
    (padded.path / "model.safetensors").unlink()
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(target.path / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = torch.cat([weights[name], torch.zeros(64, weights[name].shape[1])])
    save_file(weights, padded.path / "model.safetensors", metadata={"format": "pt"})
    report = check_pair(padded, target)
    assert [f["where"] for f in report["findings"] if f["level"] == "repairable"] == ["rows"]
    repair(padded, target, tmp_path / "repaired")
    assert check_pair(padded, resolve(str(tmp_path / "repaired")))["aligned"]
    assert read_headers(tmp_path / "repaired")[name].shape[0] == 49216


def exchange(value: dict[str, Any]) -> None:
    vocab = value["model"]["vocab"]
    a, b = list(vocab)[1000], list(vocab)[2000]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def test_with_a_permuted_copy(target: ModelSource, tmp_path: Path) -> None:
    """D2: two ids of 49152."""
    other = copy(target, tmp_path / "other")
    edit(other.path / "tokenizer.json", exchange)
    report = check_pair(target, other)
    assert "the vocabularies differ in 2 ids (the same tokens, moved)" in found(report, "tokens", "blocks")[0]["what"]
    assert not report["aligned"]


def test_with_a_copy_of_another_template(target: ModelSource, tmp_path: Path) -> None:
    other = copy(target, tmp_path / "other")
    change: Callable[[str], str] = lambda text: text.replace("assistant", "model")  # noqa: E731
    for file in other.path.glob("*.jinja"):
        file.write_text(change(file.read_text()))
    report = check_pair(target, other)
    assert report["aligned"]
    assert found(report, "template", "warns")
    assert report["repair"].startswith(f"draftsmith repair {NAME} ")
