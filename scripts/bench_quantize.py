"""What 4 bits cost a trained drafter in acceptance, and how much of it a short part with the quantizer wins back.

python -m scripts.bench_quantize --draft TRAINED --train ANSWERS --heldout ANSWERS --out quantize.jsonl
python -m scripts.bench_quantize --smoke --out quantize.jsonl        # tiny random models, a minute

A run trains TRAINED on for the same steps: with NF4 in the forward pass, with W4A16, or with no quantizer, the control that tells
what the quantizer does from what more training does. Each result is scored as it is and as its 4-bit copies, on held-out prompts
of the target's own text: top-1 agreement, α's bracket, τ by replay (argmax drafting). Each run is a process of its own; lines
that --out holds already are not run again. Needs bitsandbytes, neither vLLM nor a network. Acceptance does not depend on how
busy the machine is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from accelerate import Accelerator

from distill.answers import open_answers
from distill.fake_quantize import Format, Quantizer, quantized
from distill.objective import auto
from distill.quantize import Choice, plan_quantize
from distill.save import stored_dtype
from pairing.source import load_model, resolve
from scripts import bench_common as common
from scripts.bench_common import Row, spec, table

GOAL = 0.005  # of top-1 agreement: what 4 bits may cost after the part
FORMATS: tuple[Format, ...] = get_args(Format)
PARTS = (None, "control", *FORMATS)  # None: the trained drafter itself


# ---- the parent ----


def main(argv: Sequence[str]) -> int:
    made = common.parser((__doc__ or "").splitlines()[0])
    made.add_argument("--smoke", action="store_true", help="tiny random models: does it all run?")
    made.add_argument("--smoke-folder", type=Path, default=Path("runs/bench/smoke"), help="where they are kept")
    made.add_argument("--seeds", type=int, default=3, help="orders of the data")
    made.add_argument("--steps", type=int, default=60, help="optimizer steps of the part")
    made.add_argument("--group-size", type=int, default=64, help="of W4A16")
    made.set_defaults(lr=3e-4)
    return common.start("bench_quantize", argv, made, child, run, report)


def run(args: Any) -> list[Row]:
    if args.smoke:
        args.steps, args.seeds, args.batch_size = 4, 2, 4
        pair = common.random_pair(args.smoke_folder / "tiny", **common.TINY)
    else:
        common.require(args, "draft", "train", "heldout")
        pair = {name: str(getattr(args, name)) for name in ("draft", "train", "heldout")}
    for name in FORMATS:
        plan_quantize(resolve(pair["draft"]).path, Choice(name, group_size=args.group_size, serve_on="cuda"))
    temperature = open_answers(Path(pair["train"])).meta.get("sampling", {}).get("temperature", 0.0)
    same = {name: pair[name] for name in ("draft", "train", "heldout")}
    same |= {"group_size": args.group_size, "matmul_precision": args.matmul_precision}
    part = {"steps": args.steps, "batch_size": args.batch_size, "lr": args.lr, "trainable": args.trainable,
            "losses": auto(temperature, "greedy")[0]}  # fmt: skip
    specs = [spec(arm="trained", part=None, **same)]
    specs += [
        spec(arm=name, part=name, seed=seed, **part, **same) for seed in range(args.seeds) for name in PARTS if name
    ]
    return common.run_children("scripts.bench_quantize", specs, args.out, threads=args.threads or common.cores())


# ---- a child: one part of training, and the scores of what came of it ----


def child(task: Row) -> Row:
    common.settle(task)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    folder = Path(task["draft"])
    draft, dtype = load_model(folder), getattr(torch, stored_dtype(folder))
    copies = {name: Quantizer(name, task["group_size"], dtype) for name in FORMATS}
    if task["part"] is not None:
        common.train(
            draft, common.load_rows(Path(task["train"]), draft, "train"), losses=task["losses"], steps=task["steps"],
            batch_size=task["batch_size"], lr=task["lr"], seed=task["seed"], trainable=task["trainable"],
            accelerator=accelerator, quantizer=copies.get(task["part"]),
        )  # fmt: skip
    heldout = common.load_rows(Path(task["heldout"]), draft, "held-out")
    scores = {"full": common.scored(draft, heldout, accelerator)}
    for name, quantizer in copies.items():
        with quantized(draft, quantizer):
            scores[name] = common.scored(draft, heldout, accelerator)
    said = ", ".join(f"{name} {common.means(found)['top1']:.3f}" for name, found in scores.items())
    return {"scores": scores, "dtype": str(dtype), "machine": common.machine(task["threads"]), "said": f"top-1: {said}"}


# ---- the report ----


def report(results: Sequence[Row]) -> str:
    """Markdown: figures averaged over seeds, each beside its difference from the trained drafter in full precision."""
    whole = [row for row in results if "error" not in row]
    failed = [f"- {common.name_of(row)}: {row['error']}" for row in results if "error" in row]
    parts = ["Failed:\n" + "\n".join(failed)] if failed else []
    trained = [row["scores"] for row in whole if row["part"] is None]
    if not trained:
        return "\n".join(parts)
    lines, reached = [], []
    for part, what in zip(
        PARTS, ("as trained", "trained on", "trained on with NF4", "trained on with W4A16"), strict=True
    ):
        seeds = [row["scores"] for row in whole if row["part"] == part]
        forms = ("full", part) if part in FORMATS else ("full", *FORMATS)  # who trains for NF4 serves NF4
        for form in forms if seeds else ():
            arm = [scores[form] for scores in seeds]
            found = [common.means(scores) for scores in arm]
            top1, *alpha, tau = (
                sum(f[k] for f in found) / len(found) for k in ("top1", "alpha_low", "alpha_high", "tau")
            )
            less = [common.difference(k, arm, [trained[0]["full"]]) for k in ("top1", "tau")]
            own = part is None and form == "full"
            lines.append(
                [f"{what}: {'full precision' if form == 'full' else form.upper()}", f"{top1:.4f}"]
                + ["–".join(f"{a:.4f}" for a in alpha), f"{tau:.3f}"]
                + ["–" if own else "{:+.4f} ({:+.4f} to {:+.4f})".format(*d) for d in less]
            )
            if part == form:
                met = "met" if less[0][0] >= -GOAL else "missed"
                reached.append(f"{form.upper()} {met} ({-100 * less[0][0]:+.2f} points lost)")
    header = ("drafter", "top-1", "α", f"τ, K = {common.K}", "top-1 less the trained one's", "τ less the trained one's")
    task = whole[-1]
    note = (
        f"The part: {task.get('steps')} steps of {task.get('batch_size')} rows at lr {task.get('lr')}, mean of "
        f"{len({row['seed'] for row in whole if 'seed' in row})} orders of the data; W4A16 in groups of {task['group_size']}; "
        f"{len(trained[0]['full'])} held-out prompts. Intervals: 95 %, paired bootstrap over prompts of the mean over orders."
    )
    goal = (
        f"Goal, at most {100 * GOAL:g} points of top-1 lost to 4 bits after the part: {'; '.join(reached) or 'no run'}."
    )
    return "\n\n".join([table(header, lines), note, goal, *parts])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
