"""The pipeline before anything runs: shipped YAML files load, every fault of every stage at once, what counts as done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pairing.errors import InputError, PartFailedError
from pairing.files import write_json
from recipes import run
from recipes.config import Terminated, read_yaml, validate
from recipes.run import RunConfig, command, stages
from tests import tiny
from tests.conftest import ROOT


def shipped(**changes: Any) -> RunConfig:
    values = read_yaml(ROOT / "recipes" / "configs" / "demo" / "pipeline.yaml")
    return validate(RunConfig, values | changes, "demo")


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "configs").glob("*/pipeline.yaml")), ids=str)
def test_every_shipped_pipeline_is_a_whole_plan(file: Path) -> None:
    plan = stages(validate(RunConfig, read_yaml(file), str(file)), str(file))
    assert [s.name for s in plan] == ["generate", "init", "distill", "check", "quantize", "measure"]


def test_stages_are_joined_by_paths() -> None:
    by_name = {s.name: s.config.model_dump(mode="json") for s in stages(shipped(run_dir="r", seed=3), "demo")}
    assert by_name["distill"]["data"] == "r/data/train"
    assert by_name["distill"]["heldout"] == {"orders": "r/data/orders", "humaneval": "r/data/humaneval"}
    assert by_name["measure"]["drafters"] == {
        "drafter": "r/distill/drafter", "untrained": "r/init", "drafter-nf4": "r/nf4",
    }  # fmt: skip
    assert by_name["measure"]["workloads"]["orders"]["answers"] == "r/data/orders"
    assert by_name["init"]["answers"] == "r/data/train"  # for by: influence and narrower widths
    assert by_name["quantize"]["report"] == "r/quantize.json"
    assert {by_name[n]["seed"] for n in ("generate", "distill", "measure")} == {3}


def test_the_copy_is_the_one_that_the_drafter_is_trained_for() -> None:
    distill = {"minutes": 1, "quantizer": "w4a16", "quantizer_group_size": 32}

    def named(**quantize: str) -> dict[str, Any]:
        plan = stages(shipped(run_dir="r", distill=distill, quantize=quantize), "demo")
        return {s.name: s.config.model_dump(mode="json") for s in plan}

    assert [named()["quantize"][k] for k in ("format", "group_size", "out")] == ["w4a16", 32, "r/w4a16"]
    assert named()["measure"]["drafters"]["drafter-w4a16"] == "r/w4a16"
    assert [named(format="nf4")["quantize"][k] for k in ("format", "group_size", "out")] == ["nf4", None, "r/nf4"]


def test_prompts_held_out_of_the_training_set_are_a_set_of_their_own() -> None:
    sets = {"train": {"prompts": "my.jsonl", "heldout": 50}}
    by_name = {s.name: s for s in stages(shipped(run_dir="r", generate={"sets": sets}, measure={}), "demo")}
    assert by_name["distill"].config.model_dump(mode="json")["heldout"] == {"train-heldout": "r/data/train-heldout"}
    assert by_name["generate"].made == [Path("r/data/train/meta.json"), Path("r/data/train-heldout/meta.json")]


def test_all_faults_of_all_stages_at_once() -> None:
    with pytest.raises(InputError) as e:
        stages(shipped(init={"layer": [0]}, distill={"minutes": 1, "lrr": 2}, measure={"repeats": 0}), "p.yaml")
    lines = str(e.value).splitlines()
    assert len(lines) == 3
    assert "init: layer: unknown key; the nearest valid one is layers" in lines[0]
    assert "distill: lrr: unknown key; the nearest valid one is lr" in lines[1]
    assert "measure: repeats" in lines[2]


def test_a_run_needs_prompts_to_train_and_others_to_judge() -> None:
    with pytest.raises(InputError, match="needs a set named train and at least one held-out set"):
        stages(shipped(generate={"sets": {"train": {"prompts": "orders"}}}), "p.yaml")


def test_a_stage_that_is_still_to_come_may_be_asked_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that could not run costs no training: its keys may change, those of what was made may not."""
    target, out = tiny.folder(tmp_path / "target"), tmp_path / "run"
    words = [f"target={target}", f"run_dir={out}", "generate.sets.train.prompts=orders", "generate.sets.train.limit=9",
             "generate.sets.own.prompts=orders", "generate.sets.own.limit=9", "distill.minutes=1"]  # fmt: skip
    ran: list[str] = []

    def stage(words: list[str], quiet: bool = False) -> int:
        name = Path(words[-1]).stem
        ran.append(name)
        if name == "generate":
            for made in ("train", "own"):
                write_json(out / "data" / made / "meta.json", {"complete": True})
        return 0 if name == "generate" else 3

    monkeypatch.setattr(run, "_run", stage)
    for more in ([], ["measure.num_speculative_tokens=2"], ["distill.minutes=2"]):
        with pytest.raises(PartFailedError, match="stage init"):
            run.main([*words, *more])
    assert ran == ["generate", "init", "init", "init"]
    with pytest.raises(InputError, match=r"another run .its config differs in generate"):
        run.main([*words, "generate.temperature=1"])


def test_answers_are_done_when_they_say_so_and_all_else_when_it_is_there(tmp_path: Path) -> None:
    generate, init, *_ = stages(shipped(run_dir=str(tmp_path)), "demo")
    for name in ("train", "orders", "humaneval"):
        write_json(tmp_path / "data" / name / "meta.json", {"complete": name != "humaneval"})
    assert not generate.done()
    write_json(tmp_path / "data" / "humaneval" / "meta.json", {"complete": True})
    assert generate.done()
    assert not init.done()
    (tmp_path / "init").mkdir()
    assert init.done()


def test_only_several_processes_get_a_launcher() -> None:
    distill = next(s for s in stages(shipped(), "demo") if s.name == "distill")
    assert command(distill, Path("c.yaml"), 1)[1:] == ["-m", "recipes.distill", "--config", "c.yaml"]
    words = command(distill, Path("c.yaml"), 2)
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(("raised", "told"), [(Terminated(), True), (KeyboardInterrupt(), False)])
def test_a_stage_is_told_of_the_signal_that_reached_us_alone(
    raised: BaseException, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C goes to the whole foreground group, SIGTERM to one process: without it the stage would run on for 20 s."""
    heard: list[str] = []

    class Stage:
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                raise raised
            return -15

        def terminate(self) -> None:
            heard.append("SIGTERM")

    monkeypatch.setattr(run.subprocess, "Popen", lambda *_, **__: Stage())
    with pytest.raises(type(raised)):
        run._run(["stage"])
    assert heard == ["SIGTERM"] * told
