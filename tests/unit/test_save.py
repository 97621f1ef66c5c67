"""The type that a folder's weights are said to be stored in."""

from __future__ import annotations

from pathlib import Path

import pytest

from distill.save import stored_dtype
from pairing.files import write_json


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),  # as most published models say it
        ({"torch_dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_both_names_of_the_type_are_read(config: dict[str, str | None], dtype: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config)
    assert stored_dtype(tmp_path) == dtype
