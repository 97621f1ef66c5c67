"""What `measure` makes of its config: of a conversation its last answer, with all before it as the prompt; a drafter's arms."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator

from distill.answers import open_answers
from distill.batches import check_rows
from distill.evaluate import score_prompts, summary
from distill.prompts import load_prompts
from eval.measure import Arm, Plan
from eval.server import Settings
from pairing.acceptance import replay
from pairing.engine import Engine
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import with_mask
from pairing.pair import read_pair, update_pair
from pairing.serving_plan import Memory
from pairing.source import load_model, resolve
from recipes import measure, measure_plan
from recipes.measure import expected, record, recorded
from recipes.measure_config import MeasureConfig, WorkloadConfig
from recipes.measure_plan import chosen, drafter_arms
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


def test_categories_are_kept_apart(tmp_path: Path) -> None:
    """From a prompts file with categories (as Spec-Bench has them) to groups that keep their shares; HumanEval has none."""
    target = tiny.folder(tmp_path / "target")
    rows = [{"turns": [f"question {i}", "and then?"], "category": "qa" if i % 3 else "rag"} for i in range(9)]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = load_prompts(str(tmp_path / "bench.jsonl"), turns="every")
    made = [replace(a, prompt=p) for a, p in zip(made_up([4] * 9), prompts, strict=True)]
    answers = open_answers(store(tmp_path / "a", made, target))
    requests = chosen(answers, WorkloadConfig(answers=tmp_path / "a", limit=6), "category")
    assert Counter(r.group for r in requests) == {'category="qa"': 4, 'category="rag"': 2}
    assert {r.tags["category"] for r in requests} == {"qa", "rag"}
    human = load_prompts("humaneval", limit=3)
    made = [replace(a, prompt=p) for a, p in zip(made_up([4] * 3), human, strict=True)]
    answers = open_answers(store(tmp_path / "h", made, target))
    assert {r.group for r in chosen(answers, WorkloadConfig(answers=tmp_path / "h"), "category")} == {None}


def test_servers_are_side_by_side_where_their_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes its cache of 1 GiB, 2 GiB for its processes and its weights, which are next to nothing here."""
    target = tiny.folder(tmp_path / "target")
    arms = [Arm("target", "target"), Arm("own", "draft_model", target, 4), Arm("ngram", "ngram", None, 4)]
    on = Engine("0.32.0", "cpu", None)

    def resident(gib: float, **more: object) -> bool:
        monkeypatch.setattr(measure_plan, "device_memory", lambda _: Memory(2**40, int(gib * 2**30)))
        values = {"target": str(target), "workloads": {}, "out": tmp_path / "out", **more}
        return measure_plan.side_by_side(MeasureConfig.model_validate(values), target, arms, on)

    assert [resident(9.1), resident(8.9)] == [True, False]
    assert [resident(12.1, kv_cache_gib=2), resident(11.9, kv_cache_gib=2)] == [True, False]
    assert not resident(99, resident=False)
    says = r"3 servers side by side take about 9.0. GiB, and 8.90 GiB are free: give resident=false"
    with pytest.raises(InputError, match=says):
        resident(8.9, resident=True)


def test_arms_are_chosen_by_name(tmp_path: Path) -> None:
    arms = [Arm("target", "target"), Arm("own", "draft_model", tmp_path, 4), Arm("ngram", "ngram", None, 4)]

    def names(chosen: list[str] | None) -> list[str]:
        config = MeasureConfig(target="t", workloads={}, out=tmp_path / "out", arms=chosen)
        return [arm.name for arm in measure_plan.wanted(config, arms)]

    assert names(None) == ["target", "own", "ngram"]
    assert names(["ngram"]) == ["target", "ngram"]
    with pytest.raises(InputError, match="arms: no arm is called own-parallel: there are own, ngram"):
        names(["own-parallel"])


def test_what_is_looked_up_may_be_longer_than_what_is_drafted(tmp_path: Path) -> None:
    def arms(**more: object) -> list[Arm]:
        values = {"target": "t", "workloads": {}, "out": tmp_path, "num_speculative_tokens": 2, **more}
        return measure_plan.lookup_arms(MeasureConfig.model_validate(values))

    assert arms() == [Arm("ngram", "ngram", None, 2)]
    assert arms(lookup_num_speculative_tokens=5) == [Arm("ngram", "ngram", None, 5)]
    assert arms(ngram=False) == []


def test_a_drafter_with_a_mask_is_measured_both_ways(tmp_path: Path) -> None:
    """Arms; τ by replay of each; and what pair.json is told to serve with, the faster of the two."""
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])

    def arms(**more: object) -> list[Arm]:
        values = {"target": str(target), "workloads": {}, "out": tmp_path / "out", **more}
        return drafter_arms(MeasureConfig.model_validate(values), "own", tmp_path / "draft")

    one = Arm("own", "draft_model", tmp_path / "draft", 4)
    assert arms() == [one]  # it names no mask
    config = tmp_path / "draft" / "config.json"
    write_json(config, with_mask(read_json(config), tiny.REAL_TOKENS))
    other = Arm("own-parallel", "draft_model", tmp_path / "draft", 6, parallel_drafting=True)
    assert arms(parallel_num_speculative_tokens=6) == [one, other]
    assert arms(parallel_drafting="only", num_speculative_tokens=6) == [other]
    assert arms(parallel_drafting="off") == [one]
    words = {
        "method": "draft_model",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 6,
        "parallel_drafting": True,
    }
    assert other.speculation() == words

    folder = store(tmp_path / "a", made_up([9, 14]), target)
    answers = {"w": open_answers(folder)}
    plan = Plan(target, [one, other], {"w": chosen(answers["w"], WorkloadConfig(answers=folder), None)}, Settings())
    found = expected(plan, answers, tiny.REAL_TOKENS)
    assert set(found) == {("own", "w", None), ("own-parallel", "w", None)}
    for one_of in found.values():
        low, high = one_of.interval
        assert 1 <= low <= one_of.acceptance_length <= high <= 7
        assert one_of.temperature == 0
    assert 1 <= (found["own", "w", None].teacher_forced or 0) <= 5
    assert found["own-parallel", "w", None].teacher_forced is None
    first_token = {"w": chosen(answers["w"], WorkloadConfig(answers=folder, max_tokens=1), None)}
    assert (
        expected(replace(plan, workloads=first_token), answers, tiny.REAL_TOKENS) == {}
    )  # no round, nothing to expect

    blank = dict.fromkeys(("workload", "temperature", "concurrency", "draft_acceptance_rate", "acceptance_length",
                           "speedup_interval", "exact_match", "void", "versions", "group"))  # fmt: skip
    rows = [
        {**blank, "arm": a.name, "kind": a.kind, "speedup": s, "temperature": 0.0,
         "num_speculative_tokens": a.num_speculative_tokens, "parallel_drafting": a.parallel_drafting}
        for a, s in ((one, 1.2), (other, 1.5))
    ]  # fmt: skip
    record(plan, rows, {"gpus": [], "cpu": "A CPU", "cores": 2})
    pair = read_pair(tmp_path / "draft")
    assert [m["parallel_drafting"] for m in pair["measurements"]] == [False, True]
    assert (pair["serve"]["parallel_drafting"], pair["serve"]["num_speculative_tokens"]) == (True, 6)
    assert '"parallel_drafting": true' in pair["serve"]["command"]


def test_requests_at_a_rate_are_for_one_server_at_a_time(tmp_path: Path) -> None:
    config = MeasureConfig(target="nowhere", workloads={}, out=tmp_path / "out", rates=[0.5], resident=True)
    with pytest.raises(InputError, match=r"^rates: .*: give resident=false$"):
        measure_plan.plan_of(config, Engine("0.32.0", "cpu", None))


def test_drafts_that_are_drawn_are_replayed_by_their_own_chance(tmp_path: Path) -> None:
    """With min(1, q/p) where the answers were drawn at 1, at which it was recorded; at another temperature not at all."""
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])
    config = tmp_path / "draft" / "config.json"
    write_json(config, with_mask(read_json(config), tiny.REAL_TOKENS))
    ways = ("greedy", "probabilistic")
    arms = [
        Arm(f"{way}{'-parallel' * one}", "draft_model", tmp_path / "draft", 3, way, parallel_drafting=one)  # type: ignore[arg-type]
        for way in ways
        for one in (False, True)
    ]
    found = {}
    for temperature in (1.0, 0.5):
        folder = store(tmp_path / f"at{temperature}", made_up([9, 14, 11]), target, temperature=temperature)
        answers = {"w": open_answers(folder)}
        plan = Plan(target, arms, {"w": chosen(answers["w"], WorkloadConfig(answers=folder), None)}, Settings())
        found[temperature] = expected(plan, answers, tiny.REAL_TOKENS)
    assert {arm for arm, *_ in found[0.5]} == {"greedy", "greedy-parallel"}
    assert {arm for arm, *_ in found[1.0]} == {arm.name for arm in arms}
    assert all(one.temperature == temperature for temperature, of in found.items() for one in of.values())
    rows = check_rows(answers["w"], "w", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=512)
    model, rows = load_model(tmp_path / "draft"), replace(rows, temperature=1.0)
    for way in ways:
        scores = score_prompts(Accelerator(), model, rows, batch_size=8, draft_sample_method=way)  # type: ignore[arg-type]
        tau = replay([s.w[-1] for s in scores], 3).acceptance_length
        assert found[1.0][way, "w", None].acceptance_length == pytest.approx(tau)
        assert tau == pytest.approx(summary(scores)["tau"]["3"])
    one, other = (found[1.0][way, "w", None].acceptance_length for way in ways)
    assert one != other


def test_more_drafts_in_one_pass_than_were_trained_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])
    config = tmp_path / "draft" / "config.json"
    write_json(config, with_mask(read_json(config), tiny.REAL_TOKENS))
    update_pair(tmp_path / "draft", parallel_drafting={"num_speculative_tokens": 4})
    folder = store(tmp_path / "a", made_up([9, 14]), target)
    words = [f"target={target}", f"drafters.own={tmp_path / 'draft'}", f"workloads.w.answers={folder}",
             f"out={tmp_path / 'out'}", "max_model_len=256", "--dry-run"]  # fmt: skip
    for most, warned in ((4, 0), (5, 1)):
        assert measure.main([*words, f"parallel_num_speculative_tokens={most}"]) == 0
        said = capsys.readouterr().err
        line = f"own-parallel: num_speculative_tokens is {most}, the drafter was trained to draft 4 in one pass: "
        assert said.count("was trained to draft") == said.count(line) == warned


def test_an_acceptance_that_is_set(tmp_path: Path) -> None:
    """An arm beside the drafter's own: its words, its τ by hand, 1 + .8 + .5, nothing of it in pair.json; refused on a CPU."""
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])
    folder = store(tmp_path / "a", made_up([9, 14]), target)
    given = {"target": str(target), "workloads": {"w": {"answers": folder}}, "out": tmp_path / "out", "ngram": False,
             "drafters": {"own": str(tmp_path / "draft")}, "max_model_len": 256}  # fmt: skip
    config = MeasureConfig.model_validate({**given, "synthetic_acceptance_rates": [0.8, 0.5]})
    (arm,) = measure_plan.synthetic_arms(config, "own", tmp_path / "draft")
    words = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    words |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5]}
    assert (arm.name, arm.speculation()) == ("own-synthetic", words)
    assert measure_plan.synthetic_arms(MeasureConfig.model_validate(given), "own", tmp_path / "draft") == []
    answers = {"w": open_answers(folder)}
    plan = Plan(target, [arm], {"w": chosen(answers["w"], WorkloadConfig(answers=folder), None)}, Settings())
    (told,) = expected(plan, answers, tiny.REAL_TOKENS).values()
    assert (told.acceptance_length, told.interval) == (pytest.approx(2.3), (told.acceptance_length,) * 2)
    before = read_pair(tmp_path / "draft")
    record(plan, [], {"gpus": [], "cpu": "A CPU", "cores": 2})
    assert read_pair(tmp_path / "draft") == before
    with pytest.raises(
        InputError, match=r"vLLM 0.32.0 \(cpu\) ignores rejection_sample_method=synthetic: .*it is for GPUs$"
    ):
        measure_plan.plan_of(config, Engine("0.32.0", "cpu", None))
    rising = MeasureConfig.model_validate({**given, "synthetic_acceptance_rates": [0.5, 0.8]})
    with pytest.raises(InputError, match="they may not rise"):
        measure_plan.synthetic_arms(rising, "own", tmp_path / "draft")
