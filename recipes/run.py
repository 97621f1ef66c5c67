"""The whole pipeline from one YAML: generate, init, distill, check, quantize, measure, report; resumable stage by stage.

draftsmith run recipes/configs/demo/pipeline.yaml
draftsmith run pipeline.yaml run_dir=runs/mine target=./my-model distill.minutes=60

Each stage is the verb of that name in a process of its own, so what it held is gone when it ends. A stage is done when its
artifact is there, and artifacts are whole or absent: stopped anywhere, the same command goes on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml
from pydantic import Field
from rich.console import Console

from pairing.errors import InputError, PartFailedError
from pairing.files import read_json, write_json, write_text
from pairing.source import resolve
from pairing.vllm_plugin import die_with_parent
from recipes.check import CheckConfig
from recipes.config import Strict, Terminated, guarded, parse, validate
from recipes.distill_config import DistillConfig
from recipes.generate import GenerateConfig
from recipes.init import InitConfig
from recipes.measure_config import MeasureConfig
from recipes.quantize import QuantizeConfig
from recipes.run_folder import open_run


class RunConfig(Strict):
    run_dir: Path
    """folder of everything that the run makes"""
    target: str
    """hub id, folder or .gguf file"""
    seed: int = 0
    """of prompts, sampling, training and measuring"""
    processes: int = 1
    """processes of the distill stage, started by torchrun; on several machines run that stage by hand"""
    generate: dict[str, Any] = Field(default_factory=dict)
    """keys of `generate`, less target, out and seed; its sets are train and the held-out ones"""
    init: dict[str, Any] = Field(default_factory=dict)
    """keys of `init`, less target and out"""
    distill: dict[str, Any] = Field(default_factory=dict)
    """keys of `distill`, less draft, data, heldout, out, target and seed"""
    quantize: dict[str, Any] = Field(default_factory=dict)
    """keys of `quantize`, less drafter and out"""
    measure: dict[str, Any] = Field(default_factory=dict)
    """keys of `measure`, less target, drafters, out and seed"""


@dataclass(frozen=True)
class Stage:
    name: str
    config: Strict
    made: list[Path]  # all there: the stage is done

    def done(self) -> bool:
        """An answers folder is there from its first shard on, and says itself when it is whole; all else is atomic."""
        return all(
            path.exists() and (path.name != "meta.json" or bool(read_json(path)["complete"])) for path in self.made
        )


TRAIN = "train"  # the set that trains; every other set of `generate` is held out


def stages(config: RunConfig, where: str) -> list[Stage]:
    """Every stage with its whole config. Raises InputError with all faults of all stages before anything runs."""
    run, seed = config.run_dir, config.seed
    asked = config.generate.get("sets", {})
    # a set may have others held out of it, which become a set too
    sets = [
        *asked,
        *(f"{name}-heldout" for name in asked if isinstance(asked[name], dict) and asked[name].get("heldout")),
    ]
    if TRAIN not in sets or len(sets) < 2:
        raise InputError(f"{where}: generate.sets needs a set named {TRAIN} and at least one held-out set beside it")
    heldout = {name: str(run / "data" / name) for name in sets if name != TRAIN}
    measured = config.measure.get("workloads") or dict.fromkeys(heldout)
    workloads = {name: {"answers": heldout.get(name, name), **(keys or {})} for name, keys in measured.items()}
    form = str(config.quantize.get("format") or config.distill.get("quantizer") or "nf4")
    copy = {"format": form}  # by itself the copy that the drafter is trained for
    if form == config.distill.get("quantizer") == "w4a16":
        copy["group_size"] = config.distill.get("quantizer_group_size", 64)
    drafter, untrained, four_bit = str(run / "distill" / "drafter"), str(run / "init"), str(run / form)
    given: list[tuple[str, type[Strict], dict[str, Any], list[Path]]] = [
        ("generate", GenerateConfig, {**config.generate, "target": config.target, "out": str(run / "data"), "seed": seed},
         [run / "data" / name / "meta.json" for name in sets]),
        ("init", InitConfig,  # the text on which layers or channels are chosen, where init is asked to
         {"answers": str(run / "data" / TRAIN), **config.init, "target": config.target, "out": untrained}, [run / "init"]),
        ("distill", DistillConfig,
         {**config.distill, "target": config.target, "draft": untrained, "data": str(run / "data" / TRAIN),
          "heldout": heldout, "out": str(run / "distill"), "seed": seed},
         [run / "distill" / "drafter", run / "distill" / "evaluation.json"]),
        ("check", CheckConfig, {"target": config.target, "draft": drafter, "out": str(run / "check.json"), "record": True},
         [run / "check.json"]),
        ("quantize", QuantizeConfig,
         {"answers": next(iter(heldout.values())), **copy, **config.quantize, "drafter": drafter, "out": four_bit,
          "report": str(run / "quantize.json")}, [run / form]),
        ("measure", MeasureConfig,
         {**config.measure, "target": config.target, "out": str(run / "measure"), "seed": seed,
          "workloads": workloads,
          "drafters": {"drafter": drafter, "untrained": untrained, f"drafter-{form}": four_bit}},
         [run / "measure" / "results.jsonl"]),
    ]  # fmt: skip
    faults, out = [], []
    for name, model, values, made in given:
        try:
            out.append(Stage(name, validate(model, values, f"{where}: {name}"), made))
        except InputError as e:
            faults.append(str(e))
    if faults:
        raise InputError("\n".join(faults))
    return out


def command(stage: Stage, config_file: Path, processes: int) -> list[str]:
    """The words that run a stage. Launchers turn every exit code into 1, so only several processes get one; torchrun,
    since `accelerate launch` starts a single process where there is no GPU (docs/notebook.md)."""
    if stage.name == "distill" and processes > 1:
        script = str(Path(__file__).parent / "distill.py")
        launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), script]
    else:
        launch = [f"recipes.{stage.name}"]
    return [sys.executable, "-m", *launch, "--config", str(config_file)]


def main(argv: list[str]) -> int:
    # `run pipeline.yaml` is `run --config pipeline.yaml`
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        argv = ["--config", *argv]
    config, args = parse(RunConfig, argv, about=__doc__ or "")
    where = str(args.config or "command line")
    plan = stages(config, where)
    console = Console(stderr=True, highlight=False)
    if args.dry_run:
        for stage in plan:
            done = stage.done()
            print(f"# {stage.name}{' (done)' if done else ''}")
            print(yaml.safe_dump(stage.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), flush=True)
        return 0
    source = resolve(config.target)
    if source.note:
        console.print(f"note: {source.note}", style="yellow")
    # what a stage that is still to come is asked for may change: nothing in the folder came of it
    if open_run(config.run_dir, config, free=[stage.name for stage in plan if not stage.done()]):
        console.print(f"going on in {config.run_dir}")
    times_file = config.run_dir / "stages.json"
    times: dict[str, Any] = read_json(times_file) if times_file.is_file() else {}
    started, unmet = time.monotonic(), False
    for number, stage in enumerate(plan, 1):
        title = f"[{number}/{len(plan) + 1}] {stage.name}"
        if stage.done():
            console.print(f"{title}: done before", markup=False)
            continue
        console.print(f"{title} … ({(time.monotonic() - started) / 60:.1f} min so far)", style="bold", markup=False)
        began = time.monotonic()
        config_file = config.run_dir / "stages" / f"{stage.name}.yaml"
        write_text(
            config_file, yaml.safe_dump(stage.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        )
        code = _run(command(stage, config_file, config.processes), quiet=args.json)
        if code == 1 and stage.name == "check":
            console.print(f"{title}: the answer is no; the run ends here", style="red", markup=False)
            return 1
        if code == 2:
            raise InputError(
                f"stage {stage.name} was given wrong input (above): mend it and run the same command again"
            )
        if code == 1 and stage.name == "measure" and stage.done():
            unmet = True  # of its `require`; the report shows why
        elif code or not stage.done():
            raise PartFailedError(f"stage {stage.name} ended with code {code}: the same command goes on from there")
        # a stage that was stopped and resumed: its time adds up
        times[stage.name] = round(times.get(stage.name, 0.0) + time.monotonic() - began, 1)
        write_json(times_file, times)
    console.print(f"[{len(plan) + 1}/{len(plan) + 1}] report", style="bold", markup=False)
    words = [sys.executable, "-m", "recipes.report", str(config.run_dir), *(["--json"] if args.json else [])]
    code = _run(words)
    # 1 is the report's own answer "no": this run did what it was asked for all the same
    if code not in (0, 1):
        raise PartFailedError(f"stage report ended with code {code}")
    console.print(f"{config.run_dir / 'report.html'} · {(time.monotonic() - started) / 60:.1f} min", markup=False)
    return int(unmet)


def _run(words: list[str], quiet: bool = False) -> int:
    """Runs a stage with our terminal, and lets nothing of it outlive us. Quiet: standard output is kept for JSON."""
    process = subprocess.Popen(words, preexec_fn=die_with_parent, stdout=sys.stderr if quiet else None)
    try:
        return process.wait()
    except BaseException as e:  # Ctrl-C reached the stage too: let it end by itself, then not
        if isinstance(e, Terminated):  # SIGTERM did not
            process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


if __name__ == "__main__":
    raise SystemExit(guarded(main))
