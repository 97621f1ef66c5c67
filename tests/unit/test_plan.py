"""What `plan` computes: the literature's table, hand-worked break-evens and ceilings, bounds against whole distributions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from distill.answers import open_answers
from distill.batches import check_rows
from distill.evaluate_parallel import score_rounds
from distill.spread import max_p, spread
from eval import plan
from pairing.acceptance import replay_rounds
from pairing.decode_time import StepTime, Timer
from pairing.engine import engine
from pairing.engine_support import Support
from pairing.errors import InputError
from pairing.files import read_json
from pairing.init import init_drafter
from pairing.mask_token import free_mask, mask_id_of, write_mask
from pairing.pair import update_pair
from pairing.source import load_model, resolve
from recipes import plan as recipe
from tests import tiny
from tests.stored_answers import answered, made_up, store, two_turns

KS = range(1, 17)
# Best (K, S) at v = 1, o = 0 for constant α, from Leviathan et al. 2022's formula; checked there and here
TABLE = {
    0.05: [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)],
    0.1: [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)],
    0.2: [(1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)],
    0.375: [(1, 1.09), (1, 1.16), (2, 1.25), (2, 1.39), (4, 1.64)],
}


def costs(c: float, v: float = 1.0, ks: Sequence[int] = KS) -> dict[int, float]:
    return plan.round_costs(ks, dict.fromkeys(ks, v), c, {})


@pytest.mark.parametrize("c", TABLE)
def test_the_best_k_and_speed(c: float) -> None:
    for alpha, (K, S) in zip((0.5, 0.6, 0.7, 0.8, 0.9), TABLE[c], strict=True):
        found = plan.best_at(alpha, costs(c))
        assert (found[0], round(found[1], 2)) == (K, S)


def test_acceptance_length_by_hand() -> None:
    assert plan.acceptance_length(0.5, 3) == 1.875
    assert plan.acceptance_length(1.0, 4) == 5
    assert plan.acceptance_length(0.0, 4) == 1


def test_break_even_by_hand() -> None:
    """K = 1: 1 + α = v + c, so α = 0.5 at v = 1.2, c = 0.3. At v = 1 the break-even is α = c, and K = 1 has the least."""
    assert plan.needed(1.0, {1: 1.5}) == (1, pytest.approx(0.5))
    K, alpha = plan.needed(1.0, costs(0.3)) or (0, 0.0)
    assert (K, alpha) == (1, pytest.approx(0.3))
    assert plan.needed(1.0, {1: 2.1, 2: 3.2}) is None, "τ is at most K + 1"
    assert plan.needed(1.5, {1: 1.2}) == (1, pytest.approx(0.8))


def test_between_measured_k_it_is_linear() -> None:
    assert [plan.at({1: 1.1, 5: 1.5}, K) for K in (1, 2, 5, 8)] == pytest.approx([1.1, 1.2, 1.5, 1.5])
    assert plan.at({}, 3) == 0
    rest = plan.rest_of_round({2: 2.0}, {1: 1.0, 3: 1.2}, 0.4)
    assert rest == {2: pytest.approx(0.1)}
    assert plan.round_costs([2], {1: 1.0, 3: 1.2}, 0.4, rest) == {2: pytest.approx(2.0)}


shapes = st.builds(
    lambda c, v, slope: {K: v + slope * K + K * c for K in range(1, 9)},
    st.floats(0.01, 0.6), st.floats(1.0, 1.5), st.floats(0.0, 0.2),
)  # fmt: skip


@given(shapes, st.floats(0, 1), st.floats(0, 1))
def test_speed_rises_with_acceptance(cost: dict[int, float], a: float, b: float) -> None:
    low, high = sorted([a, b])
    assert plan.best_at(low, cost)[1] <= plan.best_at(high, cost)[1]


@given(shapes, st.floats(1.0, 3.0))
def test_what_is_needed_gives_just_that(cost: dict[int, float], goal: float) -> None:
    found = plan.needed(goal, cost)
    if found is None:
        assert all((K + 1) / c < goal for K, c in cost.items())
    else:
        K, alpha = found
        assert plan.acceptance_length(alpha, K) / cost[K] == pytest.approx(goal)
        assert all(plan.acceptance_length(alpha, K) / c <= goal + 1e-9 for K, c in cost.items())


@given(shapes, st.floats(0, 0.99))
def test_the_best_k_is_the_grids_and_within_its_ceilings(cost: dict[int, float], alpha: float) -> None:
    K, S = plan.best_at(alpha, cost)
    grid = {k: (1 - alpha ** (k + 1)) / (1 - alpha) / c for k, c in cost.items()}
    assert pytest.approx(max(grid.values())) == S
    assert grid[K] == pytest.approx(S)
    assert 1 / (1 - alpha) > S or math.isclose(S, 1 / (1 - alpha))
    assert S <= K + 1


def test_the_recommended_size_by_hand() -> None:
    """At K = 1, v = 1: S = (1 + α) / (1 + c). c = .1 at α = .8 gives 1.636; c = .12 needs α = .833, c = .2 α = .964."""
    three = [{1: 1.1}, {1: 1.12}, {1: 1.2}]
    assert [plan.recommend(three, 0.8, worth) for worth in (0.0, 0.03, 0.04, 0.16, 0.17)] == [0, 0, 1, 1, 2]
    assert plan.recommend([{1: 1.5}, {1: 1.1}], 0.8, 0.0) == 1, "a smaller one may be the slower one"


def test_whole_requests_by_hand() -> None:
    """Prompt of 100 tokens at .01 and .012 a token, 11 answer tokens in 4 rounds of 1.5, drafts after the prompt .3: the
    target alone takes 1 + 10, the pair 1.2 + .3 + 6."""
    S, low, high = plan.request_speedup(
        *(np.array([x, x], float) for x in (100, 11, 4)), own=0.01, pair=0.012, first=0.3, cost=1.5
    )
    assert S == low == high == pytest.approx(11 / 7.5)


def test_a_trained_drafter_by_hand() -> None:
    """Two answers of 7 tokens, every draft accepted: at K = 2 two rounds each for the 6 tokens after the first."""
    steps = plan.Steps(
        1,
        StepTime((10, 10, 10), (1, 1, 1), prompt_ms=100, prompt_tokens=50),
        [StepTime((2, 2, 2), (0.2, 0.2, 0.2), prompt_ms=20, prompt_tokens=50)],
        {2: 1.1}, {2: 1.6}, {2: 0.1},
    )  # fmt: skip
    told = plan.foretell(steps, [2], plan.Scored([[1.0] * 7] * 2, np.array([25.0, 25.0])))["2"]
    assert told["round"] == pytest.approx(1.6)
    assert told["request"] == pytest.approx((25 * 0.2 + 6) / (25 * 0.24 + 0.2 + 2 * 1.6))
    assert told["decode"] == pytest.approx(told["tau"] / 1.6)


@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.7, 1.0, 1.3, 2.0]), st.sampled_from([1, 3, 8, 20]))
def test_max_p_is_between_its_bounds(seed: int, temperature: float, head: int) -> None:
    """Against whole distributions of 20 ids, of every sharpness."""
    rng = np.random.default_rng(seed)
    p = -np.sort(-rng.dirichlet(np.full(20, rng.choice([0.05, 0.5, 5.0])), size=4), axis=-1)
    logp = np.log(np.maximum(p, 1e-30))
    tempered = np.exp(logp / temperature)
    exact = tempered[:, 0] / tempered.sum(-1)
    low, high = max_p(logp[:, :head], p[:, head:].sum(-1), 20 - head, temperature)
    assert (low <= exact + 1e-9).all()
    assert (exact <= high + 1e-9).all()
    if temperature == 1 or head == 20:
        np.testing.assert_allclose(low, exact, rtol=1e-6)
        np.testing.assert_allclose(high, exact, rtol=1e-6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("plan") / "target", layers=6)


def test_the_spread_of_recorded_answers(target: Path, tmp_path: Path) -> None:
    rows = [*two_turns([(3, 5), (6, 2)]), *made_up([4, 0, 7])]
    answers = open_answers(store(tmp_path / "a", rows, target))
    found = spread(answers, 10, real=tiny.REAL_TOKENS, temperature=1.0, ks=[1, 4])
    p = np.concatenate([np.exp(a.head_logprobs_NK[:, 0]) for a in rows])
    assert (found["prompts"], found["tokens"]) == (4, 27)
    assert found["max_p_at_1"][0] == pytest.approx(p.mean(), rel=1e-3)
    assert found["max_p"] == pytest.approx([p.mean()] * 2, rel=1e-3)
    assert found["max_p_at_1"][1] < p.mean() < found["max_p_at_1"][2]
    assert found["argmax_share"] == 1, "these answers are their heads' first ids"
    assert found["tau_ceiling"]["4"] == pytest.approx(sum(p.mean() ** i for i in range(5)), rel=1e-3)
    greedy = spread(answers, 10, real=tiny.REAL_TOKENS, temperature=0, ks=[1, 4])
    assert (greedy["alpha_ceiling"], greedy["tau_ceiling"]) == (1, {"1": 2, "4": 5})
    with pytest.raises(InputError, match="no answer token"):
        spread(open_answers(store(tmp_path / "none", made_up([0]), target)), 10, real=9, temperature=None, ks=[1])


def by_layers(verify: float) -> Any:
    """A stand-in for the clock: a step takes a time by layers; the real one is in tests/integration/test_plan.py."""

    @contextmanager
    def clock(_env: Any, _log: Path, batch: int = 1) -> Iterator[Timer]:
        def timer(configs: Sequence[Mapping[str, Any]], **how: Any) -> list[StepTime]:
            ms = [float(c["num_hidden_layers"]) for c in configs]
            ms += [ms[0] * (1 + verify * K * how["batch"]) for K in how["verify"]]
            ms += [ms[0] * (1 + verify * K * how["batch"]) + K * ms[len(configs) - 1] for K in how["rounds"]]
            ms += [ms[0] * (1 + verify * K * how["batch"]) + ms[len(configs) - 1] for K in how["parallel"]]
            return [StepTime((x, x, x), (x / ms[0],) * 3, x, 10) for x in ms]

        yield timer

    return clock


def planned(capsys: pytest.CaptureFixture[str], target: Path, answers: Path, *words: str) -> tuple[int, dict[str, Any]]:
    code = recipe.main([str(target), f"answers={answers}", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_go_and_no_go(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = store(tmp_path / "a", made_up([9, 12, 8]), target)
    monkeypatch.setattr(recipe, "open_timer", by_layers(0.01))
    words = ["layers=[2,3]", "assumed_acceptance=0.9", "num_speculative_tokens=[1,2,3]"]
    code, found = planned(capsys, target, answers, *words, f"out={tmp_path / 'plan.json'}")
    assert (code, found["go"], found["recommended"]) == (0, True, "2 layers")
    assert json.loads((tmp_path / "plan.json").read_text())["verdict"] == found["verdict"]
    first = found["batches"][0]
    assert [s["c"][0] for s in first["shapes"]] == pytest.approx([1 / 3, 1 / 2])
    S = {K: plan.acceptance_length(0.9, K) / (1 + 0.01 * K + K / 3) for K in (1, 2, 3)}
    assert first["shapes"][0]["assumed"] == {
        "alpha": 0.9,
        "K": max(S, key=lambda K: S[K]),
        "S": pytest.approx(max(S.values())),
    }
    assert first["perfect_free"] == {"K": 3, "S": pytest.approx(4 / 1.03)}
    assert "parallel" not in first["shapes"][0], "rounds are measured of the last shape"
    one_pass = {K: plan.acceptance_length(0.9, K) / (1 + 0.01 * K + 1 / 2) for K in (1, 2, 3)}
    assert first["shapes"][1]["parallel"]["assumed"] == {
        "alpha": 0.9,
        "K": 3,
        "S": pytest.approx(one_pass[3], rel=0.01),
    }
    assert found["memory"]["fits"]
    monkeypatch.setattr(recipe, "open_timer", by_layers(0.6))
    code, found = planned(capsys, target, answers, *words)
    assert (code, found["go"]) == (1, False)
    assert "no-go: batch 1: 0.98x (2 layers at an assumed α of 0.90, K = 1" in found["verdict"]
    assert "a perfect free drafter: 1.43x" in found["verdict"]


def planned_notes(
    capsys: pytest.CaptureFixture[str], target: Path, answers: Path, drafter: Path, trained: int
) -> list[str]:
    update_pair(drafter, parallel_drafting={"num_speculative_tokens": trained})
    words = [f"drafter={drafter}", "layers=[]", "num_speculative_tokens=[1,3]", "--dry-run"]
    assert recipe.main([str(target), f"answers={answers}", *words]) == 0
    said = capsys.readouterr().out
    _, found = planned(capsys, target, answers, *words)
    assert all(f"! {note}" in said for note in found["notes"][1:])
    return list(found["notes"])


def test_a_trained_drafter_is_foretold(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the target's own layers are a drafter that is always right: every round of K = 3 brings 4 tokens."""
    answers = store(tmp_path / "a", answered(target, 4, seed=1), target)
    drafter = tmp_path / "drafter"
    init_drafter(resolve(str(target)), drafter, list(range(6)))
    monkeypatch.setattr(recipe, "open_timer", by_layers(0.01))
    words = [f"drafter={drafter}", "layers=[2]", "num_speculative_tokens=[3]", "batch_sizes=[1]"]
    code, found = planned(capsys, target, answers, *words)
    told = found["batches"][0]["foretold"]["3"]
    assert code == 1, "as slow as the target itself"
    assert found["expected_acceptance"] == 1
    assert told["round"] == pytest.approx(4.03)
    assert told["decode"] == pytest.approx(told["tau"] / 4.03)
    assert told["request"] < 1
    assert recipe.main([str(target), f"answers={answers}", *words]) == 1
    assert "K = 3: τ " in capsys.readouterr().out


def test_a_drafter_that_drafts_in_one_pass_is_foretold_both_ways(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draft is the same both ways; for more, what the masks bring by replay over a round with one draft step in it."""
    answers = store(tmp_path / "a", answered(target, 4, seed=1), target)
    drafter = tmp_path / "drafter"
    init_drafter(resolve(str(target)), drafter, list(range(6)))
    write_mask(drafter, free_mask(drafter))
    monkeypatch.setattr(recipe, "open_timer", by_layers(0.01))
    words = [f"drafter={drafter}", "layers=[]", "num_speculative_tokens=[1,3]", "batch_sizes=[1]"]
    code, found = planned(capsys, target, answers, *words)
    batch = found["batches"][0]
    one, parallel = batch["foretold"], batch["foretold_parallel"]
    assert {k: v for k, v in parallel["1"].items() if "interval" not in k} == pytest.approx(
        {k: v for k, v in one["1"].items() if "interval" not in k}
    )
    assert parallel["3"]["round"] == pytest.approx(2.03)
    rows = check_rows(open_answers(answers), "a", rows=tiny.ROWS, real=tiny.REAL_TOKENS, context=2048)
    mask = mask_id_of(read_json(drafter / "config.json"))
    assert mask is not None
    scores = score_rounds(Accelerator(), load_model(drafter), rows, mask, 3, batch_size=2)
    tau = replay_rounds([s.accepted[-1] for s in scores], 3).acceptance_length
    assert parallel["3"]["tau"] == pytest.approx(tau)
    assert 1 < tau < one["3"]["tau"], "it was never taught to: only a round's first draft is as good"
    assert any("does not say that it was trained" in note for note in found["notes"])
    assert [n for n in planned_notes(capsys, target, answers, drafter, trained=3) if "trained" in n] == []
    (warned,) = [n for n in planned_notes(capsys, target, answers, drafter, trained=2) if "trained" in n]
    assert warned.startswith(
        "in one pass: num_speculative_tokens is 3, the drafter was trained to draft 2 in one pass: "
    )
    best = max(parallel["3"]["request"], one["1"]["request"], one["3"]["request"], parallel["1"]["request"])
    assert f"batch 1: {best:.2f}x" in found["verdict"]
    assert code == (0 if best >= 1.1 else 1)


@pytest.mark.parametrize("forced", [False, True])
def test_an_engine_without_drafts_from_one_pass(
    forced: bool, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for an older vLLM, and the runner that has none: no such round is asked for, which would end the child; one by
    one all is told."""
    answers = store(tmp_path / "a", answered(target, 4, seed=1), target)
    drafter = tmp_path / "drafter"
    init_drafter(resolve(str(target)), drafter, [0, 5])
    write_mask(drafter, free_mask(drafter))
    asked = []

    @contextmanager
    def clock(*args: Any, **kwargs: Any) -> Iterator[Timer]:
        with by_layers(0.01)(*args, **kwargs) as timer:

            def noted(models: Any, **how: Any) -> list[StepTime]:
                asked.append((list(how["rounds"]), list(how["parallel"])))
                return timer(models, **how)

            yield noted

    monkeypatch.setattr(recipe, "open_timer", clock)
    words = [f"drafter={drafter}", "layers=[]", "num_speculative_tokens=[1,3]", "batch_sizes=[1]"]
    _, whole = planned(capsys, target, answers, *words)
    if forced:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        says = "VLLM_USE_V2_MODEL_RUNNER=1 forces a runner that has no parallel_drafting for draft models: unset"
    else:
        installed = engine()
        assert installed is not None
        monkeypatch.setattr(recipe, "probe", lambda _: Support(True, False, True, "a stand-in"))
        build = f"vLLM {installed.version} ({installed.backend})"
        says = f"{build} has no parallel_drafting for draft models (a stand-in)"
    _, found = planned(capsys, target, answers, *words)
    assert asked == [([1, 3], [3]), ([1, 3], [])]
    (note,) = [n for n in found["notes"] if "one pass" in n]
    assert note.startswith(f"drafts from one pass are left out: {says}")
    batch = found["batches"][0]
    assert (batch["parallel_round"], batch["foretold_parallel"]) == ({}, None)
    assert "parallel" not in batch["shapes"][-1]
    assert batch["foretold"] == whole["batches"][0]["foretold"]
    assert whole["batches"][0]["foretold_parallel"]["3"]["tau"] > 1
    recipe.main([str(target), f"answers={answers}", *words])
    said = capsys.readouterr().out
    assert f"! {note}" in said
    assert "in one pass, K" not in said


def test_a_drafter_is_foretold_for_the_temperature_of_the_answers(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its τ is replayed on them: at another temperature it would be another drafter's go or no-go."""
    answers = store(tmp_path / "a", made_up([9, 12, 8]), target, temperature=1.0)
    drafter = tmp_path / "drafter"
    init_drafter(resolve(str(target)), drafter, [0, 5])
    words = [str(target), f"answers={answers}", "layers=[2]", "--dry-run"]
    with pytest.raises(
        InputError, match=r"^temperature=0: these answers were drawn at 1, .* generated at 0, or leave"
    ) as e:
        recipe.main([*words, f"drafter={drafter}", "temperature=0"])
    assert "\n" not in str(e.value)
    assert recipe.main([*words, f"drafter={drafter}", "temperature=1"]) == 0
    assert recipe.main([*words, f"drafter={drafter}"]) == 0
    assert recipe.main([*words, "temperature=0"]) == 0  # the target's own spread is known at any
    capsys.readouterr()


def test_answers_without_a_round_foretell_no_tau(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first token comes from the prompt: of answers of one token nothing is drafted, and the plan is written all the same."""
    answers = store(tmp_path / "a", made_up([1, 1, 1]), target)
    drafter = tmp_path / "drafter"
    init_drafter(resolve(str(target)), drafter, [0, 5])
    write_mask(drafter, free_mask(drafter))
    monkeypatch.setattr(recipe, "open_timer", by_layers(0.01))
    words = [f"drafter={drafter}", "layers=[]", "num_speculative_tokens=[1,3]", "batch_sizes=[1]"]
    words.append(f"out={tmp_path / 'plan.json'}")
    code, found = planned(capsys, target, answers, *words)
    assert code == 1
    assert json.loads((tmp_path / "plan.json").read_text())["verdict"] == found["verdict"]
    assert "no answer long enough for a round" in found["verdict"]
    for way in ("foretold", "foretold_parallel"):
        told = found["batches"][0][way]["3"]
        assert (told["tau"], told["tau_interval"], told["decode"]) == (None, None, None)
    assert recipe.main([str(target), f"answers={answers}", *words]) == 1
    assert "K = 3: no answer long enough for a round, whole requests 0." in capsys.readouterr().out
    with pytest.raises(InputError, match="one prompt has an answer"):
        planned(capsys, target, store(tmp_path / "one", made_up([9]), target), "layers=[2]")


def test_a_dry_run_measures_nothing(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "open_timer", lambda *_, **__: pytest.fail("measured"))
    answers = store(tmp_path / "a", made_up([9, 12, 8]), target)
    assert recipe.main([str(target), f"answers={answers}", f"out={tmp_path / 'p.json'}", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "E[max p]" in out
    assert "5 layers: " in out
    assert "would measure in vLLM" in out
    assert not (tmp_path / "p.json").exists()
    for words, says in (
        (["layers=[2,9]"], "the target has 6 layers"),
        (["layers=[]"], "name a number of layers"),
        (["num_speculative_tokens=[]"], "num_speculative_tokens"),
        ([f"drafter={tiny.folder(tmp_path / 'swapped', swap=(50, 60))}"], "does not fit the target"),
    ):
        with pytest.raises(InputError, match=says):
            recipe.main([str(target), f"answers={answers}", *words, "--dry-run"])
