"""The answers' folder: what is written is read back, whole or not at all, and only for the target that wrote it."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distill.answers import (
    Answer,
    begin,
    complete,
    good_spans,
    open_answers,
    require_target,
    shard_paths,
    supervised_index,
    write_shard,
)
from distill.prompts import Prompt, prompt
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json, write_json
from pairing.pair import describe_model
from pairing.source import resolve
from tests import tiny


def chat(i: int) -> Prompt:
    return prompt([{"role": "user", "content": f"Größe {i}?"}], {"seen": i % 2 == 0})


def answer(i: int, n: int = 5, k: int = 4, rows: int = 50) -> Answer:
    """A true answer's shape: the k largest of random distributions over `rows` tokens."""
    rng = np.random.default_rng(i)
    logits = rng.normal(size=(n, rows)) * 3
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :k]
    head = np.take_along_axis(logprobs, ids, axis=1)
    reason = "stop" if i % 3 else "length"
    input_ids = [1, 7, i, *ids[:, 0].tolist()]
    return Answer(chat(i), input_ids, [(3, 3 + n)], reason, ids.astype(np.int32), head.astype(np.float32))


META: dict[str, Any] = {"target": {"name": "t"}, "top_logprobs": 4, "sampling": {"temperature": 0.0}, "versions": {}}


def written(folder: Path, groups: list[list[int]]) -> Path:
    assert begin(folder, META) == set()
    for group in groups:
        write_shard(folder, [answer(i) for i in group])
    complete(folder, {})
    return folder


def test_read_back(tmp_path: Path) -> None:
    found = open_answers(written(tmp_path / "a", [[0, 1], [2]]))
    assert len(found.data) == 3
    for i in range(3):
        one, row = answer(i), next(row for row in found.data.with_format("numpy") if row["id"] == chat(i).id)
        assert json.loads(row["messages"]) == chat(i).messages
        assert json.loads(row["tags"]) == {"seen": i % 2 == 0}
        assert row["input_ids"].tolist() == one.input_ids
        assert row["spans"].tolist() == [3, 8]
        assert len(row["tail_ids"]) == len(row["tail_logprobs"]) == 0
        assert row["finish_reason"] == one.finish_reason
        assert row["head_ids"].reshape(5, 4).tolist() == one.head_ids_NK.tolist()
        np.testing.assert_allclose(row["head_logprobs"].reshape(5, 4), one.head_logprobs_NK, rtol=2**-11)
        # from the full head, not from the rounded one: exact to float32, and head and tail are 1 together
        exact = 1 - np.exp(one.head_logprobs_NK.astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(row["tail_mass"], exact, atol=1e-7)
    assert found.meta["stats"]["stop"] == 2
    assert found.meta["stats"]["length"] == 1
    assert found.meta["stats"]["answer_tokens"] == {"total": 15, "mean": 5.0, "p50": 5, "p90": 5, "max": 5}


def test_a_head_without_tail_and_a_token_without_probability(tmp_path: Path) -> None:
    begin(tmp_path / "a", META)
    sure = np.array([[1e-7, -np.inf]], np.float32)  # float32 sums may pass 1 by a rounding
    write_shard(tmp_path / "a", [Answer(chat(0), [1, 3], [(1, 2)], "stop", np.array([[3, 4]], np.int32), sure)])
    complete(tmp_path / "a", {})
    row = open_answers(tmp_path / "a").data.with_format("numpy")[0]
    assert row["tail_mass"].tolist() == [0.0]
    assert np.isfinite(row["head_logprobs"]).all()
    np.testing.assert_allclose(np.exp(row["head_logprobs"]), [1, 0], atol=1e-6)


def test_rows_do_not_depend_on_who_was_answered_first(tmp_path: Path) -> None:
    one = open_answers(written(tmp_path / "a", [[0, 1, 2, 3, 4]])).data
    other = open_answers(written(tmp_path / "b", [[4, 2], [1], [3, 0]])).data
    assert one.to_list() == other.to_list()
    assert one["id"][:] == sorted(one["id"][:])


def test_spans_of_several_answers(tmp_path: Path) -> None:
    """Positions are those of all spans in order; drawn tail ids stand beside them, with their own log p."""
    one = answer(0, n=5)
    tails = np.arange(15, dtype=np.int32).reshape(5, 3)
    logp = np.linspace(-4, -15, 15, dtype=np.float32).reshape(5, 3)
    ids = [1, 7, *one.input_ids[3:5], 9, 9, *one.input_ids[5:8]]
    folder = tmp_path / "a"
    begin(folder, META | {"tail_samples": 3})
    rows = [
        Answer(chat(0), ids, [(2, 4), (6, 9)], "stop", one.head_ids_NK, one.head_logprobs_NK, tails, logp),
        answer(1),
    ]
    write_shard(folder, rows)
    stats = complete(folder, {})
    row = next(row for row in open_answers(folder).data.with_format("numpy") if row["id"] == chat(0).id)
    assert row["spans"].tolist() == [2, 4, 6, 9]
    assert supervised_index(row["spans"]).tolist() == [2, 3, 6, 7, 8]
    assert row["input_ids"][supervised_index(row["spans"])].tolist() == one.head_ids_NK[:, 0].tolist()
    assert row["tail_ids"].reshape(5, 3).tolist() == tails.tolist()
    np.testing.assert_allclose(row["tail_logprobs"].reshape(5, 3), logp, rtol=2**-11)
    assert (stats["prompts"], stats["answers"]) == (2, 3)
    assert (stats["prompt_tokens"]["total"], stats["answer_tokens"]["total"]) == (4 + 3, 5 + 5)


@pytest.mark.parametrize(
    ("flat", "good"),
    [
        ([1, 9], True),
        ([2, 4, 4, 9], True),
        ([2, 4, 6, 9], True),
        ([], True),
        ([0, 9], False),  # nothing predicts the first token
        ([2, 4, 6, 8], False),  # a token after the last answer
        ([2, 4, 6, 10], False),
        ([2, 2, 6, 9], False),
        ([2, 7, 6, 9], False),
        ([6, 9, 2, 4], False),
        ([2, 4, 9], False),
    ],
)
def test_which_spans_are_good(flat: list[int], good: bool) -> None:
    assert good_spans(flat, 9) is good


@pytest.mark.parametrize(("k", "m"), [(32, 0), (24, 8)])
def test_a_supervised_token_costs_200_bytes(tmp_path: Path, k: int, m: int) -> None:
    begin(tmp_path / "a", META)
    rows = [answer(i, n=100, k=k) for i in range(20)]
    if m:
        ids, logp = np.zeros((100, m), np.int32), np.zeros((100, m), np.float32)
        rows = [replace(row, tail_ids_NM=ids, tail_logprobs_NM=logp) for row in rows]
    path = write_shard(tmp_path / "a", rows)
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    assert [str(table.schema.field(n).type.value_type) for n in ("head_ids", "head_logprobs")] == ["int32", "halffloat"]
    per_token = ("input_ids", "head_ids", "head_logprobs", "tail_mass", "tail_ids", "tail_logprobs")
    values = sum(table[name].combine_chunks().flatten().nbytes for name in per_token)
    assert values == (200 * 100 + 4 * 3) * 20
    assert path.stat().st_size < 1.02 * values  # prompts, offsets and the format's own bytes come on top


def test_half_written_shards_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a"
    begin(folder, META)
    write_shard(folder, [answer(0)])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt  # stands for the kill: nothing after it runs

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            write_shard(folder, [answer(1)])
    assert len(list((folder / "shards").iterdir())) == 2  # the torn one lies there
    assert [path.name for path in shard_paths(folder)] == ["part-00000.arrow"]
    assert begin(folder, META) == {chat(0).id}
    assert len(list((folder / "shards").iterdir())) == 1  # and is swept up
    assert write_shard(folder, [answer(1)]).name == "part-00001.arrow"
    assert begin(folder, META) == {chat(0).id, chat(1).id}


def test_more_shards_than_five_digits_count(tmp_path: Path) -> None:
    """3.2 million prompts: part-100000 comes after part-99999, and is not written over."""
    begin(tmp_path / "a", META)
    (tmp_path / "a" / "shards").mkdir()
    for number in (99998, 99999, 100000):
        (tmp_path / "a" / "shards" / f"part-{number:05d}.arrow").touch()
    assert write_shard(tmp_path / "a", [answer(1)]).name == "part-100001.arrow"


def test_rows_that_are_there_twice_are_not_called_whole(tmp_path: Path) -> None:
    with pytest.raises(PartFailedError, match="1 rows are there twice, so two runs wrote at once: delete"):
        written(tmp_path / "a", [[1, 2], [2, 3]])
    with pytest.raises(InputError, match="not complete"):
        open_answers(tmp_path / "a")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "a", META)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("distill.answers.write_bytes", full)
    with pytest.raises(PartFailedError, match=r"could not be written \(No space left on device\); .*make room"):
        write_shard(tmp_path / "a", [answer(1)])


def test_incomplete_missing_or_damaged_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no answers there"):
        open_answers(tmp_path / "nowhere")
    begin(tmp_path / "a", META)
    write_shard(tmp_path / "a", [answer(0)])
    with pytest.raises(InputError, match="not complete: run the same `draftsmith generate`"):
        open_answers(tmp_path / "a")
    folder = written(tmp_path / "b", [[0], [1], [2]])
    shutil.copytree(folder, tmp_path / "c")
    shard_paths(folder)[1].unlink()
    with pytest.raises(InputError, match=r"2 answers where meta\.json counts 3"):
        open_answers(folder)
    for cut in (0.5, 0.0):
        path = shard_paths(tmp_path / "c")[2]
        path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
        with pytest.raises(InputError, match=r"part-00002\.arrow: damaged"):
            open_answers(tmp_path / "c")
        with pytest.raises(InputError, match=r"part-00002\.arrow: damaged"):
            begin(tmp_path / "c", META)


def test_answers_of_an_older_schema_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [[0]])
    write_json(folder / "meta.json", read_json(folder / "meta.json") | {"schema": 1})
    for reads in (open_answers, lambda folder: begin(folder, META)):
        with pytest.raises(
            InputError, match=r"a: answers of schema 1, this version reads 2: delete .* `draftsmith gener"
        ):
            reads(folder)


def test_another_run_or_a_strange_folder_is_never_written_to(tmp_path: Path) -> None:
    begin(tmp_path / "a", META)
    with pytest.raises(
        InputError, match=r"holds other answers \(they differ in sampling, top_logprobs\)|top_logprobs, sa"
    ):
        begin(tmp_path / "a", META | {"sampling": {"temperature": 1.0}, "top_logprobs": 8})
    assert begin(tmp_path / "a", META | {"versions": {"torch": "later"}}) == set()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="holds no answers of draftsmith: name another folder"):
        begin(tmp_path / "mine", META)
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    """Same name, same tokenizer, other weights: only the digests tell."""
    target = resolve(str(tiny.folder(tmp_path / "one", seed=0)))
    begin(tmp_path / "a", META | {"target": describe_model(target)})
    write_shard(tmp_path / "a", [answer(0)])
    complete(tmp_path / "a", {})
    found = open_answers(tmp_path / "a")
    assert read_json(tmp_path / "a" / "meta.json")["complete"] is True
    require_target(found, target)
    tiny.folder(tmp_path / "one", seed=1)
    with pytest.raises(InputError, match=r"written by another target: .* differs from .* in its weights: generate"):
        require_target(found, resolve(str(tmp_path / "one")))
