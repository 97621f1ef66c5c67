"""What the verbs that serve do with a drafter that names a mask: which arms, and advice that each of them takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pairing import preflight
from pairing.engine import Engine
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import with_mask
from pairing.pair import update_pair
from pairing.parallel_drafting import WHERE, trained_one_by_one
from pairing.serving_plan import Memory
from pairing.source import resolve
from recipes import check, distill, measure, plan, serve, sweep
from tests import tiny
from tests.stored_answers import made_up, store

OLD = Engine("0.20.0", "cuda", None)  # drafts with a model, not in parallel
WORDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "measure": (measure.main, ["target={target}", "drafters.own={draft}", "workloads.w.answers={a}", "out={out}"]),
    "sweep": (sweep.main, ["target={target}", "drafter={draft}", "workloads.w.answers={a}", "out={out}"]),
    "serve": (serve.main, ["{draft}"]),
    "plan": (plan.main, ["{target}", "drafter={draft}", "answers={a}", "layers=[]"]),
    "distill": (distill.main, ["draft={draft}", "data={a}", "out={out}", "parallel_drafting=4", "threads=1"]),
}
ONE_PASS = '"parallel_drafting": true'  # in a line that serves


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """target/, a/ (its answers) and draft/, whose config names a padding row as mask and whose pair.json knows no training."""
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "draft", [0, 2])
    config = tmp_path / "draft" / "config.json"
    write_json(config, with_mask(read_json(config), tiny.REAL_TOKENS))
    store(tmp_path / "a", made_up([9, 14]), target)
    return tmp_path


def call(verb: str, place: Path, *more: str) -> int:
    main, words = WORDS[verb]
    given = [
        word.format(target=place / "target", draft=place / "draft", a=place / "a", out=place / "out") for word in words
    ]
    length = [] if verb in ("plan", "distill") else ["max_model_len=256"]
    return main([*given, *length, *more, "--dry-run"])


@pytest.mark.parametrize("verb", ["measure", "sweep", "serve"])
def test_an_engine_without_it_is_refused_with_advice_that_the_verb_takes(
    verb: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for another vLLM: what the message says to give is given, and the same command goes on."""
    for module in (measure, sweep, serve):
        monkeypatch.setattr(module, "require_vllm", lambda _: OLD)
    monkeypatch.setattr(preflight, "engine", lambda: OLD)
    monkeypatch.setattr(preflight, "probe", lambda _: None)
    monkeypatch.setattr(preflight, "device_memory", lambda _: Memory(64 << 30, 60 << 30))
    update_pair(place / "draft", parallel_drafting={"num_speculative_tokens": 4})
    with pytest.raises(InputError, match=r"vLLM 0\.20\.0 \(cuda\) has no parallel_drafting for draft models") as e:
        call(verb, place)
    advice = re.search(r"give (\w+=\w+)", str(e.value))
    assert advice is not None, str(e.value)
    assert call(verb, place, advice[1]) == 0
    assert ONE_PASS not in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["measure", "sweep"])
def test_both_ways_are_for_drafters_that_were_trained_for_both(
    verb: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was distilled without masks keeps the mask that init prepared, which learnt nothing."""

    def in_one_pass(*more: str) -> bool:
        assert call(verb, place, *more) == 0
        return ONE_PASS in capsys.readouterr().out

    assert in_one_pass()  # not trained at all: nothing is said against it
    update_pair(place / "draft", training={"steps": 9})
    assert trained_one_by_one(place / "draft")
    assert not in_one_pass()
    assert in_one_pass("parallel_drafting=only")
    update_pair(place / "draft", parallel_drafting={"num_speculative_tokens": 4})
    assert not trained_one_by_one(place / "draft")
    assert in_one_pass()
    assert not in_one_pass("parallel_drafting=off")
    (place / "draft" / "pair.json").unlink()  # others' drafter
    assert not trained_one_by_one(place / "draft")
    assert in_one_pass()


@pytest.mark.parametrize("verb", WORDS)
def test_a_mask_that_is_no_id_is_one_line(verb: str, place: Path) -> None:
    config = place / "draft" / "config.json"
    write_json(config, read_json(config) | {"pard_token": "<mask>"})
    with pytest.raises(InputError, match=r"'<mask>'.*which is no token id") as e:
        call(verb, place)
    assert "\n" not in str(e.value)


def test_check_tells_a_mask_that_is_no_id_from_none(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pre-flight of the same report takes it for a mask: what it is, is said once."""
    config = place / "draft" / "config.json"
    words = [
        str(place / "target"),
        str(place / "draft"),
        "max_model_len=256",
        "speculative_config={parallel_drafting: true}",
    ]

    def blocks(id_: object) -> list[str]:
        write_json(config, read_json(config) | {"pard_token": id_})
        check.main([*words, "--json"])
        report = json.loads(capsys.readouterr().out)
        found = [f for f in [*report["findings"], *report["preflight"]["findings"]] if f["level"] == "blocks"]
        return [f["what"] for f in found if f["where"] in ("mask token", WHERE)]

    assert blocks("<mask>") == ["the drafter's mask id is '<mask>' (pard_token), which is no token id"]
    (none,) = blocks(None)
    assert none.startswith(
        "the drafter's config.json names no mask token (dflash_config.mask_token_id, mask_token_id, "
    )
    assert blocks(tiny.REAL_TOKENS) == []
