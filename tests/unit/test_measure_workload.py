"""What `measure` takes from stored answers: of a conversation its last answer, with all before it as the prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distill.answers import open_answers
from recipes.measure import WorkloadConfig, chosen, recorded
from tests import tiny
from tests.stored_answers import K, made_up, store, two_turns


def test_a_conversation_is_asked_for_its_last_answer(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target")
    rows = [*two_turns([(3, 5), (6, 2)]), *made_up([4, 0])]
    folder = store(tmp_path / "a", rows, target)
    answers = open_answers(folder)
    requests = chosen(answers, WorkloadConfig(answers=folder, limit=9), None)
    by_id = {a.prompt.id: a for a in rows}
    assert sorted(r.id for r in requests) == sorted(a.prompt.id for a in rows if a.spans)
    log_probs, references = recorded({"w": answers})
    for r in requests:
        one = by_id[r.id]
        start, end = one.spans[-1]
        assert r.prompt_ids == one.input_ids[:start]
        assert references["w", r.id] == one.input_ids[start:end]
        for at in range(end - start):
            position = one.supervised - (end - start) + at
            found = log_probs["w", r.id, at]
            assert list(found) == one.head_ids_NK[position].tolist()
            assert len(found) == K
            np.testing.assert_allclose(list(found.values()), one.head_logprobs_NK[position], rtol=2**-10)
    assert len(log_probs) == 5 + 2 + 4
