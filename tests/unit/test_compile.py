"""torch.compile, a layer at a time: all layers stay compiled, however many there are and whatever the batches' lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distill.answers import open_answers
from distill.batches import Batch, check_rows, collate
from distill.options import compile_layers
from distill.student import supervised_hidden
from tests import tiny
from tests.stored_answers import made_up, store

LAYERS = 6  # two compilations each: more than the 8 after which torch goes on uncompiled without a word
BATCHES = [[0, 1], [2, 3, 4], [1, 3, 5]]  # whose longest rows have 27, 40 and 61 tokens


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # instead of going on uncompiled
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    place = tmp_path_factory.mktemp("place")
    answers = store(place / "a", made_up([4, 7, 12, 15, 20, 41]), tiny.folder(place / "target"))
    rows = check_rows(open_answers(answers), "data", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    by_length = np.argsort(rows.tokens_P)  # rows lie in the order of their ids
    return [collate(rows, by_length[some]) for some in BATCHES]


def gradients(model: Any, batch: Batch) -> list[torch.Tensor]:
    model.zero_grad()
    hidden = supervised_hidden(model.train(), batch)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_layers_of_any_length_stay_compiled_and_learn_the_same(batches: list[Batch]) -> None:
    """With the shared prefix, and in evaluation between steps."""
    plain, compiled = tiny.model(layers=LAYERS), tiny.model(layers=LAYERS)
    compile_layers(compiled, backend="eager")
    torch._dynamo.utils.counters.clear()
    for batch in batches:
        assert batch.shared > 0
        expected, found = gradients(plain, batch), gradients(compiled, batch)
        assert len(found) == len(expected) > 9 * LAYERS
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
        with torch.no_grad():
            torch.testing.assert_close(
                supervised_hidden(compiled.eval(), batch), supervised_hidden(plain.eval(), batch), rtol=1e-4, atol=1e-4
            )
    counted = torch._dynamo.utils.counters
    assert counted["frames"]["ok"] >= LAYERS
    assert not counted["graph_break"]
