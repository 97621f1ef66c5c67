"""Which objective and which signal give the most acceptance at an equal budget: the ablation, over seeds, with intervals.

python -m scripts.bench_objectives --smoke --out runs/bench/smoke-objectives.jsonl
python -m scripts.bench_objectives --draft runs/bench/draft --train runs/bench/answers/train \\
    --heldout runs/bench/answers/heldout --out runs/bench/objectives.jsonl [--jobs 8 --device cuda]

Each arm and seed is a process of its own: the same draft, rows, order, steps and rate; only the objective or the signal
differs. Lines that --out holds already are not run again. Figures are of held-out prompts, on the target's own text: top-1
agreement, α's bracket, and τ by replay (argmax drafting). Needs neither vLLM nor bitsandbytes nor a network. With --keep the
drafters stay, for scripts.bench_served.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator

from distill.answers import open_answers
from distill.objective import auto
from pairing.errors import InputError
from pairing.files import new_folder, read_json
from pairing.init import copy_companions, init_drafter, spaced
from pairing.source import load_model, resolve
from pairing.width import importance, influential, shape_of
from scripts import bench_common as common
from scripts.bench_common import Row, spec, table

# An arm is an objective on the record's K most likely tokens (`cache`), or on the online target's whole distribution. Losses that
# a record can give are compared on it: that is how they are used, and an online step costs more than twice as much.
# The last arms ask which of the target's layers to begin with, as many as --draft has: "auto, K=32" begins with --draft itself.
ARMS: dict[str, Row] = {
    "fkl, K=32": {"losses": {"forward_kl": 1.0}, "cache": 32},
    "fkl, K=8": {"losses": {"forward_kl": 1.0}, "cache": 8},
    "fkl, online": {"losses": {"forward_kl": 1.0}},
    "jsd, online": {"losses": {"jsd": 1.0}},
    "tv, K=32": {"losses": {"total_variation": 1.0}, "cache": 32},
    "lk, K=32": {"losses": {"lk_hybrid": 1.0}, "cache": 32},
    "fkl + 0.1 ce, K=32": {"losses": {"forward_kl": 1.0, "cross_entropy": 0.1}, "cache": 32},
    "auto, K=32": {"losses": "auto", "cache": 32},
    "auto, from the first layers": {"losses": "auto", "cache": 32, "layers": "first"},
    "auto, from the last layers": {"losses": "auto", "cache": 32, "layers": "last"},
    "auto, from spaced layers": {"losses": "auto", "cache": 32, "layers": "spaced"},
    "auto, from layers of most influence": {"losses": "auto", "cache": 32, "layers": "influence"},
}
TEXTS = 24  # training answers on which influence is measured
REFERENCE = "fkl, K=32"


# ---- the parent ----


def main(argv: Sequence[str]) -> int:
    made = common.parser((__doc__ or "").splitlines()[0])
    made.add_argument("--smoke", action="store_true", help="tiny random models: does it all run?")
    made.add_argument("--smoke-folder", type=Path, default=Path("runs/bench/smoke"), help="where they are kept")
    made.add_argument("--arms", help=f"some of: {'; '.join(ARMS)}; separated by semicolons")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--keep", type=Path, help="a folder for the trained drafters; without it none is kept")
    made.add_argument("--steps", type=int, default=60, help="optimizer steps of each run: the equal budget")
    made.add_argument("--jobs", type=int, default=1, help="runs at one time; a GPU takes many")
    made.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return common.start("bench_objectives", argv, made, child, run, report)


def run(args: Any) -> list[Row]:
    arms = [arm.strip() for arm in args.arms.split(";")] if args.arms else list(ARMS)
    if unknown := set(arms) - set(ARMS):
        raise InputError(f"--arms: no arm is called {', '.join(sorted(unknown))}: there are {'; '.join(ARMS)}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here: take --device cpu")
    if args.smoke:
        args.steps, args.seeds, args.batch_size = 5, 2, 4
        pair = common.random_pair(args.smoke_folder / "tiny", **common.TINY)
    else:
        common.require(args, "draft", "train", "heldout")
        folders = {name: str(getattr(args, name)) for name in ("draft", "train", "heldout")}
        pair = {"target": str(resolve(args.target).path), **folders}
    answers = open_answers(Path(pair["train"]))
    for arm in arms:
        recorded = answers.meta["top_logprobs"]
        if ARMS[arm].get("cache", 0) > recorded:
            raise InputError(
                f"{arm}: the answers in {pair['train']} record {recorded} tokens a position: generate them "
                f"with top_logprobs={ARMS[arm]['cache']}, or leave this arm out with --arms"
            )
    temperature = answers.temperature or 0.0
    same = {
        "steps": args.steps,
        "batch_size": args.batch_size,
        "lr": args.lr,
        "trainable": args.trainable,
        "matmul_precision": args.matmul_precision,
        "device": device,
    } | ({"keep": str(args.keep)} if args.keep else {})
    specs = [
        spec(
            arm=arm,
            seed=seed,
            losses=losses_of(arm, temperature),
            cache=ARMS[arm].get("cache"),
            **{key: value for key, value in ARMS[arm].items() if key == "layers"},
            **pair,
            **same,
        )
        for seed in range(args.seeds)
        for arm in arms
    ]
    threads = args.threads or max(1, common.cores() // args.jobs)
    return common.run_children("scripts.bench_objectives", specs, args.out, jobs=args.jobs, threads=threads)


def losses_of(arm: str, temperature: float) -> Any:
    """The arm's objective; `auto` is what distill chooses for argmax drafting at the temperature of the answers."""
    losses = ARMS[arm]["losses"]
    return auto(temperature, "greedy")[0] if losses == "auto" else losses


# ---- a child: one arm, one seed ----


def child(task: Row) -> Row:
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temp:
        return trained(task, start_of(task, Path(temp)))


def start_of(task: Row, temp: Path) -> Path:
    """The drafter that the run begins with: --draft, or as many of the target's layers, chosen as its arm says."""
    draft = Path(task["draft"])
    if "layers" not in task:
        return draft
    target = resolve(task["target"])
    config = read_json(target.path / "config.json")
    count, of = read_json(draft / "config.json")["num_hidden_layers"], config["num_hidden_layers"]
    if task["layers"] == "influence":
        rows = open_answers(Path(task["train"])).data
        texts = [row["input_ids"] for row in rows.select(range(min(TEXTS, len(rows))))]
        layers = influential(importance(load_model(target.path), texts, shape_of(config)).influence_L, count)
    else:
        choices = {"first": range(count), "last": range(of - count, of), "spaced": spaced(count, of)}
        layers = list(choices[task["layers"]])
    init_drafter(target, temp / "draft", layers)
    return temp / "draft"


def trained(task: Row, start: Path) -> Row:
    common.settle(task)
    accelerator = Accelerator(cpu=task["device"] == "cpu")
    draft = load_model(start)
    layers = {"from": read_json(start / "pair.json")["made"][-1]["layers"]} if "layers" in task else {}
    rows = common.load_rows(Path(task["train"]), draft, "train")
    target = None if task["cache"] else load_model(Path(task["target"]))
    done = common.train(
        draft, rows, losses=task["losses"], steps=task["steps"], batch_size=task["batch_size"], lr=task["lr"],
        seed=task["seed"], trainable=task["trainable"], target=target, top_logprobs=task["cache"], accelerator=accelerator,
    )  # fmt: skip
    del target
    if "keep" in task:
        keep(draft, start, kept_at(task))
    scores = common.scored(draft, common.load_rows(Path(task["heldout"]), draft, "held-out"), accelerator)
    found = common.means(scores)
    return {
        "supervised_tokens": done[-1]["tokens"],
        "seconds": done[-1]["seconds"],
        "loss": done[-1]["loss"],
        "scores": scores,
        **layers,
        "machine": common.machine(task["threads"]),
        "said": f"top-1 {found['top1']:.3f}, τ {found['tau']:.3f}, {done[-1]['seconds']:.0f} s",
    }


def kept_at(task: Row) -> Path:
    """Where a run's drafter is kept."""
    return Path(task["keep"]) / re.sub(r"[^a-z0-9]+", "-", f"{task['arm']} {task['seed']}".lower())


def keep(model: Any, draft: Path, folder: Path) -> None:
    if folder.exists():  # of a run that was killed before its line was written
        shutil.rmtree(folder)
    with new_folder(folder) as temp:
        model.save_pretrained(temp)
        copy_companions(draft, temp)


# ---- the report ----


def report(results: Sequence[Row]) -> str:
    """Markdown: each arm's figures averaged over seeds, its difference to the reference, and which one wins."""
    whole = [row for row in results if "error" not in row]
    arms = {
        arm: [row["scores"] for row in whole if row["arm"] == arm] for arm in dict.fromkeys(r["arm"] for r in whole)
    }
    failed = [f"- {common.name_of(row)}: {row['error']}" for row in results if "error" in row]
    parts = ["Failed:\n" + "\n".join(failed)] if failed else []
    if not arms:
        return "\n".join(parts)
    lines = []
    for arm, seeds in arms.items():
        found = [common.means(scores) for scores in seeds]
        seconds = mean(row["seconds"] for row in whole if row["arm"] == arm)
        low, high = (mean(f[k] for f in found) for k in ("alpha_low", "alpha_high"))
        lines.append(
            [arm, _spread([f["top1"] for f in found]), f"{low:.3f}–{high:.3f}", _spread([f["tau"] for f in found])]
            + [_less(figure, seeds, arms.get(REFERENCE)) if arm != REFERENCE else "–" for figure in ("top1", "tau")]
            + [f"{seconds:.0f}"]
        )
    header = (
        "arm",
        "top-1 (seeds)",
        "α",
        f"τ, K = {common.K} (seeds)",
        f"top-1 less {REFERENCE}'s",
        f"τ less {REFERENCE}'s",
        "s",
    )
    task = whole[0]
    note = (
        f"{task['steps']} steps of {task['batch_size']} rows, {task['supervised_tokens']:,} supervised tokens, "
        f"lr {task['lr']:g}, "
        f"{len(task['scores'])} held-out prompts. Intervals: 95 %, paired bootstrap over prompts of the mean over seeds; "
        "in brackets behind a mean the least and the most of the seeds."
    )
    return "\n\n".join([table(header, lines), note, winner(arms), *parts])


def winner(arms: dict[str, list[list[Row]]]) -> str:
    """The arm of the highest mean τ, and those that the held-out prompts do not tell from it."""
    taus = {arm: mean(common.tau(scores) for scores in seeds) for arm, seeds in arms.items()}
    best = max(taus, key=lambda arm: taus[arm])
    alike = [a for a in arms if a != best and common.difference("tau", arms[best], arms[a])[1] <= 0]
    return f"Highest τ: {best} ({taus[best]:.3f}); not told from it by these prompts: {', '.join(alike) or 'none'}."


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def _less(figure: str, seeds: list[list[Row]], other: list[list[Row]] | None) -> str:
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*common.difference(figure, seeds, other)) if other else "–"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
