"""`serve` before it starts anything: whether the two models fit, and whether the target is the one that the drafter is of."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from pairing.errors import InputError
from pairing.files import write_json
from pairing.pair import new_pair
from pairing.source import resolve
from recipes import serve
from tests import tiny


def drafter(path: Path, target: Path, **kwargs: Any) -> Path:
    folder = tiny.folder(path, layers=1, **kwargs)
    write_json(folder / "pair.json", new_pair(resolve(str(target)), {"step": "init"}))
    return folder


def dry(folder: Path, *words: str) -> int:
    return serve.main([str(folder), "max_model_len=256", "--dry-run", *words])


def test_another_vocabulary_of_equal_size_is_refused(tmp_path: Path) -> None:
    """D2: vLLM compares the number of rows and would start."""
    target = tiny.folder(tmp_path / "target")
    swapped = drafter(tmp_path / "swapped", target, swap=(50, 60))
    with pytest.raises(InputError, match=r"swapped does not fit .*target: the vocabularies differ in 2 ids") as e:
        dry(swapped)
    assert "\n" not in str(e.value)
    padded = drafter(tmp_path / "padded", target, rows=288)
    with pytest.raises(InputError, match=r"same tokenizer, padding differs.*`draftsmith repair"):
        dry(padded)


def test_a_target_that_it_was_not_made_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.folder(tmp_path / "target")
    folder = drafter(tmp_path / "drafter", target)
    assert dry(folder) == 0
    told = capsys.readouterr()
    assert str(target) in shlex.split(told.out)
    assert "not the target" not in told.err
    tuned = tiny.folder(tmp_path / "tuned", seed=1)
    assert dry(folder, f"target={tuned}") == 0
    told = capsys.readouterr()
    assert str(tuned) in shlex.split(told.out)
    assert f"{tuned} is not the target that the drafter was made for ({target}): it differs in its weights." in told.err
