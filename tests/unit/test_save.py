"""What is written of a trained drafter, beside what tests/integration/test_distill.py sees of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.save import write_drafter
from pairing.errors import PartFailedError
from pairing.source import load_model
from tests import tiny


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    """Such as a row of a frozen embedding that no text held, so that no loss was ever NaN."""
    draft = tiny.folder(tmp_path / "draft", layers=1)
    model = load_model(draft)
    with torch.no_grad():
        model.get_input_embeddings().weight[200, 3] = float("nan")
    with pytest.raises(
        PartFailedError, match=r"embed_tokens\.weight holds NaN or infinite numbers, as it did in .*draft: no"
    ):
        write_drafter(tmp_path / "out", draft, model, {"training": {}, "verdict": "", "sets": {}}, {}, tmp_path)
    assert not (tmp_path / "out").exists()
