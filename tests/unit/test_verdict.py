"""The verdict: what is said, from rows written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from eval.verdict import judge, serve_with
from tests.sample_run import drafted, evaluation, result, results


def rows(*arms: dict[str, Any], **target: Any) -> list[dict[str, Any]]:
    return [result("target", "target", **target), *arms]


def drafter(speedup: float | None, low: float = 0.0, high: float = 0.0, **fields: Any) -> dict[str, Any]:
    interval = None if speedup is None else [low, high]
    counts = drafted([320, 250, 190, 140], 400)
    return result("drafter", "draft_model", speedup=speedup, speedup_interval=interval, **{**counts, **fields})


def test_a_gain_is_deployed_with_the_numbers_that_explain_it() -> None:
    """τ by hand: 1 + (320+250+190+140)/400 = 3.25; 900 of 1600 drafted tokens is 56 %."""
    found = judge(results(), evaluation())
    assert found["answer"] == "deploy"
    assert found["sentence"] == (
        "Deploy drafter at K = 4: it serves orders at 1.34x the target's own speed (95 % interval 1.28 to 1.40); a "
        "round emits τ = 3.25 tokens, 56 % of drafted tokens are accepted, and every output is the target's own, token "
        "for token; but slower on humaneval (0.81x)."
    )
    assert found["best"]["arm"] == "drafter"
    assert found["void"] == [
        {"arm": "drafter-nf4", "workload": "orders", "num_speculative_tokens": 4,
         "reason": "the server ended at start (logs/drafter-nf4.log)"}
    ]  # fmt: skip
    assert found["alarms"] == []
    answers = {(c["workload"], a["arm"]): a["answer"] for c in found["cells"] for a in c["arms"]}
    assert answers == {
        ("orders", "drafter"): "faster",
        ("orders", "ngram"): "no measurable difference",
        ("orders", "untrained"): "slower",
        ("orders", "drafter-nf4"): "void",
        ("humaneval", "drafter"): "slower",
        ("humaneval", "ngram"): "no measurable difference",
    }


def test_a_well_accepted_drafter_that_slows_serving_down_is_a_no() -> None:
    """D24: τ 3.25 at 0.7x: a round costs 3.25 / 0.7 = 4.64 target steps."""
    found = judge(rows(drafter(0.70, 0.66, 0.74)))
    assert found["answer"] == "do not deploy"
    assert found["sentence"] == (
        "Do not deploy: no gain; the fastest arm, drafter at K = 4, serves orders at 0.70x the target's own speed "
        "(95 % interval 0.66 to 0.74), slower: a round emits τ = 3.25 tokens and costs about 4.64 target steps."
    )


def test_arms_are_ranked_by_speed_not_by_acceptance() -> None:
    """D24: K = 6 has the longer τ and the lower speed."""
    short = drafter(1.30, 1.25, 1.35)
    long = {**drafter(1.20, 1.15, 1.25, acceptance_length=4.1), "num_speculative_tokens": 6}
    found = judge(rows(long, short))
    assert found["best"]["num_speculative_tokens"] == 4


def test_an_interval_that_holds_one_is_no_gain() -> None:
    found = judge(rows(drafter(1.02, 0.97, 1.07)))
    assert found["answer"] == "do not deploy"
    assert "1.02x" in found["sentence"]
    assert "no measurable gain" in found["sentence"]


def test_when_ngram_wins_the_drafter_is_not_worth_deploying() -> None:
    ngram = result("ngram", "ngram", speedup=1.5, speedup_interval=[1.4, 1.6], **drafted([300, 200, 100, 50], 400))
    found = judge(rows(drafter(1.2, 1.1, 1.3), ngram))
    assert found["answer"] == "do not deploy"
    assert found["sentence"] == (
        "Do not deploy the drafter: ngram at K = 4, which needs none, serves orders at 1.50x the target's own speed "
        "(95 % interval 1.40 to 1.60); the drafter (drafter at K = 4) at 1.20x (1.10 to 1.30)."
    )
    assert judge(rows(ngram))["answer"] == "deploy"  # nobody asked about a drafter


def test_the_untrained_drafter_is_shown_and_never_recommended() -> None:
    untrained = {**drafter(1.5, 1.4, 1.6), "arm": "untrained"}
    found = judge(rows(untrained, drafter(1.2, 1.1, 1.3)))
    assert found["best"]["arm"] == "drafter"


@pytest.mark.parametrize("why", [None, "", "log-probs under the target -0.1 and -3.0: no tie"])
def test_outputs_that_differ_and_are_no_tie_forbid_deploying(why: str | None) -> None:
    mismatch = {"id": "abc", "repeat": 0, "position": 3, "target_token": 1, "arm_token": 2, "why": why}
    found = judge(rows(drafter(1.4, 1.3, 1.5, exact_match=0.9, mismatches=[mismatch])))
    assert found["answer"] == "do not deploy"
    assert found["sentence"].startswith("Do not deploy: outputs change; ")
    assert "first abc at token 3" in found["sentence"]


def test_a_slower_arm_that_also_differs_has_no_gain_first() -> None:
    mismatch = {"id": "abc", "repeat": 0, "position": 3, "target_token": 1, "arm_token": 2, "why": None}
    found = judge(rows(drafter(0.8, 0.7, 0.9, exact_match=0.9, mismatches=[mismatch])))
    assert found["sentence"].startswith("Do not deploy: no gain; ")
    assert (
        "slower: 1 output differs from the target's and not by a tie in rounding, first abc at token 3"
        in found["sentence"]
    )


def test_a_tie_in_rounding_is_lossless_and_told() -> None:
    mismatch = {"id": "abc", "repeat": 0, "position": 3, "target_token": 1, "arm_token": 2, "why": "a tie in rounding"}
    found = judge(rows(drafter(1.4, 1.3, 1.5, exact_match=23 / 24, mismatches=[mismatch])))
    assert found["answer"] == "deploy"
    assert "95.8 % of outputs are the target's own token for token, the rest a tie in rounding" in found["sentence"]


def test_a_lossy_arm_gives_way_to_a_lossless_one() -> None:
    mismatch = {"id": "abc", "repeat": 0, "position": 3, "target_token": 1, "arm_token": 2, "why": None}
    lossy = {**drafter(1.6, 1.5, 1.7, mismatches=[mismatch]), "arm": "drafter-nf4"}
    assert judge(rows(lossy, drafter(1.2, 1.1, 1.3)))["best"]["arm"] == "drafter"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (rows(drafter(1.4, 1.3, 1.5, void="the server died")), "drafter: the server died"),
        (rows(drafter(1.4, 1.3, 1.5), void="out of memory"), "drafter: the target alone is void: out of memory"),
        ([drafter(1.4, 1.3, 1.5)], "drafter: the target alone was not measured beside it"),
        (rows(drafter(None)), "drafter: no speedup with an interval"),
        (rows(), "no arm but the target was measured"),
    ],
)
def test_what_cannot_be_told_is_not_measurable_and_says_why(made: list[dict[str, Any]], why: str) -> None:
    found = judge(made)
    assert found["answer"] == "not measurable"
    assert f"Not measurable: on orders {why}" in found["sentence"]
    assert found["best"] is None


def test_replayed_cached_prompts_void_a_cell() -> None:
    """D20: 2 % of prompt tokens came from the prefix cache."""
    found = judge(rows(drafter(9.0, 8.0, 10.0, prefix_cache_hit_rate=0.02)))
    assert found["answer"] == "not measurable"
    assert found["void"][0]["reason"] == "prefix cache hit rate 2.0 %: it replayed cached prompts"


@pytest.mark.parametrize(("replayed", "alarmed"), [(3.25 * 1.01, False), (3.25 * 1.03, True), (3.25 * 0.97, True)])
def test_an_alarm_where_offline_and_served_acceptance_part(replayed: float, alarmed: bool) -> None:
    """D15: more than 2 % apart, in either direction."""
    found = judge(rows(drafter(1.4, 1.3, 1.5, replay_acceptance_length=replayed)))
    assert bool(found["alarms"]) == alarmed
    assert not alarmed or "drafter on orders at K = 4 has τ" in found["alarms"][0]


def test_offline_high_and_served_low_is_named_with_both_figures() -> None:
    """D15: healthy validation, 2 % accepted when served."""
    served = drafted([20, 2, 0, 0], 275)  # 22 of 1100
    found = judge(rows(drafter(0.6, 0.5, 0.7, replay_acceptance_length=3.10, **served)))
    assert "has τ 3.10 by replay and 1.08 served (+187.0 %; limit 2 %)" in found["alarms"][0]


def test_a_training_that_changed_nothing_is_said_so() -> None:
    """D15: learning rate 0."""
    still = evaluation()
    for s in still["sets"].values():
        s["change"] = {"top1": [0.001, -0.004, 0.006], "tau_4": [0.0, -0.01, 0.01]}
    found = judge(rows(drafter(1.4, 1.3, 1.5)), still)
    assert found["sentence"].endswith("; training made no measurable change.")
    assert found["alarms"][0].startswith("Training made no measurable change: on orders, top1 changed by +0.001")
    still["sets"]["humaneval"]["change"]["tau_4"] = [0.2, 0.1, 0.3]
    assert "training made no" not in judge(rows(drafter(1.4, 1.3, 1.5)), still)["sentence"]


def test_ignore_eos_is_not_representative() -> None:
    """D23."""
    found = judge(rows(drafter(1.4, 1.3, 1.5), settings={"ignore_eos": True}))
    assert found["alarms"] == ["Not representative: orders was measured with ignore_eos: answers ran past their end."]


def test_nothing_served_claims_no_speed() -> None:
    found = judge([], evaluation())
    assert found["answer"] == "not measurable"
    assert "replay gives τ = 3.19 at K = 4" in found["sentence"]
    assert judge([])["sentence"] == "Not measurable: nothing was served."


def test_where_the_recommended_arm_loses_at_a_higher_load() -> None:
    """D24: per concurrency; the lowest gives the headline, whatever the order of rows."""
    loaded = [{**r, "concurrency": 8} for r in rows(drafter(0.9, 0.85, 0.95))]
    found = judge([*loaded, *rows(drafter(1.4, 1.3, 1.5))])
    assert found["answer"] == "deploy"
    assert found["sentence"].endswith("but slower on orders with 8 requests in flight (0.90x).")


def test_a_cell_measured_again_replaces_the_earlier_one() -> None:
    found = judge(rows(drafter(None, void="the server died"), drafter(1.4, 1.3, 1.5)))
    assert found["answer"] == "deploy"
    assert found["void"] == []


def test_what_to_serve_with() -> None:
    found = judge(rows(drafter(1.4, 1.3, 1.5)))
    made = serve_with(found, "org/target", None)
    assert made is not None
    assert made["command"] == (
        "vllm serve org/target --speculative-config "
        """'{"method": "draft_model", "num_speculative_tokens": 4, "model": "runs/demo/drafter"}'"""
    )
    own = {"serve": {"num_speculative_tokens": 4, "command": "vllm serve org/target --their-own"}}
    assert (serve_with(found, "org/target", own) or {})["command"] == "vllm serve org/target --their-own"
    own["serve"]["num_speculative_tokens"] = 3  # a line for another K than the one that won
    assert (serve_with(found, "org/target", own) or {})["command"] == made["command"]
    own["serve"]["num_speculative_tokens"] = 4
    parallel = judge(rows({**drafter(1.4, 1.3, 1.5), "parallel_drafting": True}))
    command = (serve_with(parallel, "org/target", own) or {})["command"]  # nor a line for drafts one by one
    assert command.endswith('"model": "runs/demo/drafter", "parallel_drafting": true}\'')
    own["serve"]["parallel_drafting"] = True
    assert (serve_with(parallel, "org/target", own) or {})["command"] == "vllm serve org/target --their-own"
    slower = judge(rows(drafter(0.7, 0.6, 0.8)))
    assert (serve_with(slower, "org/target", own) or {})["command"] == "vllm serve org/target"
    assert serve_with(judge([]), "org/target", own) is None


def test_a_gain_within_the_machines_noise_is_none() -> None:
    """A/A: the target against itself measured 0.95 to 1.12, so 1.10 says nothing and 1.30 does."""
    again = result("target-again", "target", speedup=1.03, speedup_interval=[0.95, 1.12], exact_match=1.0)
    (cell,) = (found := judge(rows(again, drafter(1.10, 1.05, 1.15))))["cells"]
    assert found["answer"] == "do not deploy"
    assert "no measurable gain: it lies within the machine's noise" in found["sentence"]
    assert "differs from itself by 0.95 to 1.12" in found["sentence"]
    assert [a["arm"] for a in cell["arms"]] == ["drafter"]
    assert cell["noise"] == [0.95, 1.12]
    assert judge(rows(drafter(1.10, 1.05, 1.15)))["answer"] == "deploy"
    assert judge(rows(again, drafter(1.30, 1.25, 1.35)))["answer"] == "deploy"


def test_sampled_output_names_its_check() -> None:
    check = {"passed": True, "p": 0.4, "tokens": 528}
    found = judge(rows(drafter(1.3, 1.2, 1.4, exact_match=None, mismatches=None, losslessness=check)))
    assert found["sentence"].endswith("and 528 sampled tokens agree with the target's own distribution (p = 0.4).")


def test_precision_that_was_not_reached_is_an_alarm() -> None:
    asked = {"speedup_half_width": 0.051, "precision": 0.03, "precision_reached": False}
    (alarm,) = judge(rows(drafter(1.3, 1.24, 1.37, **asked)))["alarms"]
    assert alarm.startswith("Precision not reached: the speedup of drafter on orders is known to ± 5.1 %, asked ± 3 %")
    assert judge(rows(drafter(1.3, 1.24, 1.37, **asked | {"precision_reached": True})))["alarms"] == []


@pytest.mark.parametrize(
    ("interval", "alarm"), [(None, True), ([3.12, 3.2], False), ([3.12, 3.18], True), ([3.32, 3.4], True)]
)
def test_replay_and_served_may_differ_by_two_percent_of_what_replay_leaves_open(
    interval: list[float] | None, alarm: bool
) -> None:
    """Served τ is 3.25; replay says 3.12 (4 % below), drafts past an answer's end could bring it to the upper bound."""
    one = drafter(1.3, 1.2, 1.4, replay_acceptance_length=3.12, replay_interval=interval)
    assert bool(judge(rows(one))["alarms"]) == alarm


def test_arms_served_otherwise_are_told_once() -> None:
    one = drafter(1.3, 1.2, 1.4)
    one["settings"] = one["settings"] | {"differs": ["scheduling synchronous, the target's unknown"]}
    found = judge(rows(one, one | {"workload": "code"}))
    assert found["alarms"] == [
        "Served otherwise than the target alone: drafter: scheduling synchronous, the target's unknown."
    ]
