"""`--require`: what is read, what is refused before anything is served, and what lets a build pass."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval import requirements
from eval.measure import Arm, Plan
from eval.server import Settings
from pairing.errors import InputError
from recipes import measure as recipe
from recipes.config import guarded, parse
from recipes.measure import with_requirements
from recipes.measure_config import MeasureConfig
from tests.sample_run import result

ARMS = [Arm("target", "target"), Arm("drafter", "draft_model", Path("d"), 4), Arm("ngram", "ngram", None, 4)]
PLAN = Plan(Path("t"), ARMS, {"orders": [], "code": []}, Settings(), concurrencies=(1, 8), temperatures=(0.0, 0.7))


def rows(**drafter: Any) -> list[dict[str, Any]]:
    """Every cell of PLAN: the drafter 1.3x (1.2 to 1.4), n-gram slower."""
    fields = {"speedup": 1.3, "speedup_interval": [1.2, 1.4], "acceptance_length": 3.0, "draft_acceptance_rate": 0.5}
    slow = {"speedup": 0.9, "speedup_interval": [0.8, 1.0]}
    cells = [
        {"workload": w, "temperature": t, "concurrency": c} for w in PLAN.workloads for t in (0.0, 0.7) for c in (1, 8)
    ]
    arms = [
        result("target", "target"),
        result("drafter", "draft_model", **fields | drafter),
        result("ngram", "ngram", **slow),
    ]
    return [row | at for at in cells for row in arms]


def again(speedup: float, interval: list[float]) -> list[dict[str, Any]]:
    """The A/A arm in every cell of PLAN."""
    one = result("target-again", "target", speedup=speedup, speedup_interval=interval)
    return [one | {k: r[k] for k in ("workload", "temperature", "concurrency")} for r in rows() if r["arm"] == "target"]


def judged(text: str, measured: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    return requirements.judge(requirements.read([text], PLAN), measured)


@pytest.mark.parametrize(
    ("text", "met", "missed"),
    [
        ("speedup>=1.2", 8, 0),
        ("speedup>1.2", 0, 8),
        ("speedup >= 1.25", 0, 8),  # the point is 1.3: noise lets no build pass
        ("speedup>=1.2@c1", 4, 0),
        ("speedup>=1.2@c1@orders@t0.7", 1, 0),
        ("speedup>=1.2@ngram@c8", 0, 4),
        ("acceptance_length>=3@orders", 4, 0),
        ("draft_acceptance_rate>0.5@orders@t0", 0, 2),
        ("exact_match>=1", 4, 0),  # at temperature 0
    ],
)
def test_every_cell_that_is_named_must_meet_it(text: str, met: int, missed: int) -> None:
    good, bad = judged(text, rows())
    assert (len(good), len(bad)) == (met, missed)


def test_the_line_says_what_was_judged() -> None:
    _, (line,) = judged("speedup>=1.25@c1@orders@t0", rows())
    assert line == (
        "not met: speedup>=1.25@c1@orders@t0: drafter on orders, temperature 0, 1 in flight: speedup 1.300, judged by the "
        "lower bound of its 95 % interval, 1.200 to 1.400"
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"void": "the server died"}, "void: the server died"),
        ({"prefix_cache_hit_rate": 0.5}, "prefix cache hit rate 50.0 %"),
        ({"speedup": None, "speedup_interval": None}, "not measurable"),
        ({"speedup_interval": None}, "no speedup with an interval"),
    ],
)
def test_nothing_passes_on_a_void_cell(fields: dict[str, Any], why: str) -> None:
    good, bad = judged("speedup>=0.1@c1", rows(**fields))
    assert (len(good), len(bad)) == (0, 4)
    assert all(why in line for line in bad)
    assert judged("speedup>=0.1", []) == ([], ["not met: speedup>=0.1: no such cell was measured"])


MISMATCH = {"id": "p1", "repeat": 0, "position": 3, "target_token": 1, "arm_token": 2}


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ([r | {"void": "it died"} if r["arm"] == "target" else r for r in rows()], "the target alone is void: it died"),
        ([r for r in rows() if r["arm"] != "target"], "the target alone was not measured beside it"),
        (rows(exact_match=0.9, mismatches=[MISMATCH | {"why": "no tie"}]), "1 output differs from the target's"),
        ([*rows(), *again(1.2, [1.1, 1.4])], "it lies within the machine's noise"),
    ],
)
def test_a_speedup_passes_only_where_the_verdict_lets_it_stand(measured: list[dict[str, Any]], why: str) -> None:
    good, bad = judged("speedup>=1.1@c1", measured)
    assert (len(good), len(bad)) == (0, 4)
    assert all(why in line for line in bad)
    assert len(judged("acceptance_length>=3@c1", measured)[0]) == 4  # a count of the arm's own


def test_what_asks_for_no_gain_passes_within_the_noise() -> None:
    measured = [*rows(), *again(1.2, [1.1, 1.4])]
    assert len(judged("speedup>=0.9@c1", measured)[0]) == 4
    tie = MISMATCH | {"why": "log-probs under the target -0.1 and -0.1: a tie in rounding"}
    assert len(judged("speedup>=1.1@c1", rows(exact_match=0.9, mismatches=[tie]))[0]) == 4
    assert len(judged("speedup>=1.1@c1", [*rows(), *again(1.0, [0.9, 1.1])])[0]) == 4  # noise that ends below it


def test_without_a_drafter_it_is_asked_of_every_arm() -> None:
    plan = Plan(Path("t"), [ARMS[0], ARMS[2]], {"orders": []}, Settings())
    (one,) = requirements.read(["speedup>=1"], plan)
    assert one.arms == ("ngram",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("speed>=1.2", "is no requirement"),
        ("speedup=1.2", "is no requirement"),
        ("speedup<=1.2", "is no requirement"),
        ("speedup>=fast", "is no requirement"),
        ("", "is no requirement"),
        ("speedup>=1.2@c4", "c4 is not measured: concurrencies are 1, 8"),
        ("speedup>=1.2@t1", "t1 is not measured: temperatures are 0, 0.7"),
        ("speedup>=1.2@eagle", "'eagle' is not measured: arms are drafter, ngram; workloads orders, code"),
        ("speedup>=1.2@target", "'target' is not measured"),
        ("speedup>=1.2@orders@code", "names its workloads twice"),
        ("exact_match>=1@t0.7", "at temperature 0 only"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(InputError, match="require: ") as e:
        requirements.read([text], PLAN)
    assert why in str(e.value)
    assert "\n" not in str(e.value)


def test_the_flag_is_the_key() -> None:
    argv = ["--require", "speedup>=1.2@c1", "target=t", "--require=exact_match>=1", "workloads={}", "out=o"]
    config, _ = parse(MeasureConfig, with_requirements(argv))
    assert config.require == ["speedup>=1.2@c1", "exact_match>=1"]
    with pytest.raises(InputError, match="--require needs"):
        with_requirements(["target=t", "--require"])


@pytest.mark.parametrize("words", [["--precision", "3%"], ["--precision=3 %"], ["precision=3%"], ["precision=0.03"]])
def test_precision_is_given_in_percent_or_as_a_part(words: list[str]) -> None:
    config, _ = parse(MeasureConfig, with_requirements([*words, "target=t", "workloads={}", "out=o"]))
    assert config.precision == pytest.approx(0.03)


@pytest.mark.parametrize(
    "word", ["precision=300%", "precision=0%", "precision=%", "precision=3.3.3%", "precision=narrow"]
)
def test_a_precision_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(InputError, match="precision: "):
        parse(MeasureConfig, with_requirements([word, "target=t", "workloads={}", "out=o"]))
    with pytest.raises(InputError, match="--precision needs"):
        with_requirements(["target=t", "--precision"])


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("speedup>=1.2@c1", 0, "met: speedup>=1.2@c1@drafter: drafter on orders"),
        ("speedup>=1.3@c1", 1, "not met: speedup>=1.3@c1@drafter: drafter on orders"),
        ("speedup>=1.3@c3", 2, "c3 is not measured"),
    ],
)
def test_the_exit_code_is_the_answer(
    text: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe with stand-ins for what serves and reads models: what is judged are the rows of above."""
    served: list[Path] = []
    source = SimpleNamespace(note=None, path=tmp_path)
    for name, stand_in in {
        "require_vllm": lambda stage: SimpleNamespace(backend="cpu"),
        "plan_of": lambda config, engine: (
            replace(PLAN, arms=[ARMS[0], ARMS[2], replace(ARMS[1], model=None)]),
            source,
            {},
        ),
        "measure": lambda plan, out: served.append(out),
        "load_tokenizer": lambda path: None,
        "tokens_by_id": lambda tokenizer: [0],
        "write_results": lambda *given: rows(),
    }.items():
        monkeypatch.setattr(recipe, name, stand_in)
    argv = ["target=t", "workloads={}", f"out={tmp_path / 'out'}", "record=false", "--require", f"{text}@drafter"]
    monkeypatch.setattr(sys, "argv", ["measure", *argv])
    assert guarded(recipe.main) == code
    assert said in capsys.readouterr().err
    assert len(served) == (code != 2)
