"""Which shape of drafter gives the most speed: depth, width or both, at three sizes, each distilled the same short time.

python scripts/bench_init.py --target T --train ANSWERS --heldout ANSWERS --out runs/bench_init
python scripts/bench_init.py … --train-only     # no engine: on a machine that trains
python scripts/bench_init.py … --time-only      # no training: on the machine that will serve; the same --out

Answers are folders of `draftsmith generate`. Sizes are given as numbers of layers at the target's full width; for each,
"width" keeps all layers and "both" about √(layers x the target's layers) of them, in the width that the same number of
parameters allows: hidden, heads and FFN shrink, the FFN in steps of 64. Channels are chosen on the training answers. A
line of results.jsonl per run as it ends; lines that exist are not run again, so a stopped bench goes on. table.md: τ by
replay, the draft step c, and the speed S = τ / (v + K·c + o) at the best K. v, a verify step in target steps, is measured
at K = 4 in the same engine unless it is given; o, the rest of a round, is given: measure it for your server.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from distill.answers import open_answers, require_target
from distill.batches import Rows, check_rows, collate
from distill.evaluate import score_prompts, summary
from distill.train import Settings, fit
from pairing.decode_time import Timer, engine_name, open_timer
from pairing.files import append_jsonl, read_json, read_jsonl, write_text
from pairing.init import Width, init_drafter, plan_init, spaced
from pairing.serving import context
from pairing.source import ModelSource, load_model, load_tokenizer, resolve
from pairing.width import Importance, Shape, choose, importance, shape_of, shapes_below

LONGEST = 512  # tokens of a text that importance is measured on
TOGETHER = 3  # shapes timed side by side with the target
SHOWN_K = 4


def shapes_of(target: ModelSource, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """{"name", "family", "size", "layers", "width", "parameters"} of each shape; those that no width reaches are left out."""
    config = read_json(target.path / "config.json")
    of, old = int(config["num_hidden_layers"]), shape_of(config)
    found = []
    for size in sizes:
        most = plan_init(target, spaced(size, of))["parameters"]
        shapes: dict[str, tuple[list[int], Shape | None]] = {"depth": (spaced(size, of), None)}
        for family, count in (("width", of), ("both", round((size * of) ** 0.5))):
            layers = spaced(count, of)
            if (shape := filling(target, layers, old, config["architectures"][0], most)) is not None:
                shapes[family] = (layers, shape)
        for family, (layers, shape) in shapes.items():
            if any((layers, shape) == (f["layers"], f["width"]) for f in found):
                continue  # a coarse grid of widths may give the same shape for two sizes
            parameters = plan_init(target, layers, None, Width(shape) if shape else None)["parameters"]
            named = {"name": f"{family}-{size}", "family": family, "size": size}
            found.append(named | {"layers": layers, "width": shape, "parameters": parameters})
    return found


def filling(target: ModelSource, layers: list[int], old: Shape, architecture: str, most: int) -> Shape | None:
    """The width at which these layers take nearly `most` parameters; None where the narrowest takes more.

    Of each hidden size the widest FFN that fits (multiples of 64, NF4's block); of these the one nearest to the target's
    proportion of FFN to hidden. A hidden size that cannot take that many parameters with the target's whole FFN comes
    last: it would not be of this size.
    """
    steps = range(64, old.ffn + 1, 64)

    def parameters(shape: Shape) -> int:
        return int(plan_init(target, layers, None, Width(shape))["parameters"])

    def proportion(shape: Shape) -> float:
        return abs(math.log((shape.ffn / shape.hidden) / (old.ffn / old.hidden)))

    found = []
    for shape in shapes_below(old, architecture):
        count = bisect_right(steps, most, key=lambda ffn, shape=shape: parameters(replace(shape, ffn=ffn)))
        if count:
            widest = replace(shape, ffn=steps[count - 1])
            found.append(
                (count == len(steps), proportion(widest) if count < len(steps) else -parameters(widest), widest)
            )
    return min(found, key=lambda option: option[:2])[2] if found else None


def read_rows(folder: Path, target: ModelSource) -> Rows:
    answers = open_answers(folder)
    require_target(answers, target)
    config = read_json(target.path / "config.json")
    real = max(load_tokenizer(target.path).get_vocab().values()) + 1
    return check_rows(answers, str(folder), rows=config["vocab_size"], real=real, context=context(config) or 10**9)


def settings_of(args: argparse.Namespace, seed: int) -> Settings:
    return Settings(
        seed=seed, batch_size=args.batch_size, accumulation=1, lr=args.lr, warmup=0.04, weight_decay=0.0, beta2=0.98,
        clip=1.0, trainable=args.trainable, losses={"forward_kl": 1.0, "cross_entropy": 0.1}, chunk=None, epochs=None,
        max_steps=args.steps, minutes=None, eval_every=10**9, eval_prompts=1, checkpoint_every=max(args.steps // 2, 1),
        keep=1,
    )  # fmt: skip


def importance_of(target: ModelSource, train: Rows, texts: int) -> Importance:
    batches = (collate(train, np.array([i]), torch.device("cpu")) for i in range(min(texts, len(train))))
    ids = [batch.input_BL[0, :LONGEST].tolist() for batch in batches]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return importance(load_model(target.path).to(device), ids, shape_of(read_json(target.path / "config.json")))


def train_all(args: argparse.Namespace, target: ModelSource, shapes: Sequence[Mapping[str, Any]]) -> None:
    done = {(r["name"], r["seed"]) for r in read_jsonl(args.out / "results.jsonl") if r["kind"] == "train"}
    todo = [(shape, seed) for shape in shapes for seed in args.seeds if (shape["name"], seed) not in done]
    if not todo:
        return
    train, heldout = read_rows(args.train, target), read_rows(args.heldout, target)
    found = importance_of(target, train, args.texts) if any(shape["width"] for shape, _ in todo) else None
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    old = shape_of(read_json(target.path / "config.json"))
    for shape, seed in todo:
        folder = args.out / "drafters" / shape["name"]
        if not folder.exists():
            width = None
            if shape["width"] is not None and found is not None:
                width = Width(shape["width"], choose(found, old, shape["width"]))
            init_drafter(target, folder, shape["layers"], width=width)
        model = load_model(folder).to(accelerator.device)

        def score(model: Any = model) -> dict[str, Any]:
            return summary(score_prompts(accelerator, model, heldout, batch_size=args.batch_size))

        before = score()
        run = args.out / "training" / f"{shape['name']}-{seed}"
        trained = fit(accelerator, model, train, {}, settings_of(args, seed), run)
        row = {"kind": "train", **_plain(shape), "seed": seed, "steps": trained["steps"], "minutes": trained["minutes"]}
        row |= {"device": str(accelerator.device), "prompts": len(heldout), "before": before, "after": score()}
        append_jsonl(args.out / "results.jsonl", row)
        shutil.rmtree(run)
        print(f"{shape['name']}, seed {seed}: top-1 {before['top1']:.3f} to {row['after']['top1']:.3f}", flush=True)
        del model
        gc.collect()


def time_all(args: argparse.Namespace, target: ModelSource, shapes: Sequence[Mapping[str, Any]], timer: Timer) -> None:
    rows = read_jsonl(args.out / "results.jsonl")
    done = {r["name"] for r in rows if r["kind"] == "time"}
    todo = [shape for shape in shapes if shape["name"] not in done]
    whole = read_json(target.path / "config.json")
    if not any(r["kind"] == "verify" for r in rows):
        own, verify = timer([whole], verify=[SHOWN_K])
        row = {"kind": "verify", "K": SHOWN_K, "engine": engine_name(), "target_ms": list(own.ms)}
        append_jsonl(args.out / "results.jsonl", row | {"ms": list(verify.ms), "share": list(verify.share)})
        print(f"verifying {SHOWN_K} + 1 tokens: {verify.share[0]:.2f} of the target's step", flush=True)
    for start in range(0, len(todo), TOGETHER):
        group = todo[start : start + TOGETHER]
        widths = [Width(shape["width"]) if shape["width"] else None for shape in group]
        configs = [plan_init(target, s["layers"], None, w)["config"] for s, w in zip(group, widths, strict=True)]
        own, *times = timer([whole, *configs])
        for shape, time in zip(group, times, strict=True):
            row = {"kind": "time", **_plain(shape), "engine": engine_name(), "target_ms": list(own.ms)}
            append_jsonl(args.out / "results.jsonl", row | {"ms": list(time.ms), "share": list(time.share)})
            print(f"{shape['name']}: {time.share[0]:.3f} of the target's step", flush=True)


def _plain(shape: Mapping[str, Any]) -> dict[str, Any]:
    return dict(shape) | {"width": asdict(shape["width"]) if isinstance(shape["width"], Shape) else None}


def best_speed(tau: Mapping[str, float | None], c: float, v: float, o: float) -> tuple[int, float]:
    """The K of the largest S = τ / (v + K·c + o), and that S (Leviathan et al. 2022)."""
    speeds = {int(K): t / (v + int(K) * c + o) for K, t in tau.items() if t is not None}
    best = max(speeds, key=lambda K: speeds[K])
    return best, speeds[best]


def table(rows: Sequence[Mapping[str, Any]], v: float | None, o: float) -> str:
    """Markdown, the fastest shape first; a column is empty where its part has not run yet. v None: what was measured."""
    lines = []
    measured = next((r["share"] for r in rows if r["kind"] == "verify"), None)
    known = f"{v:g}" if v is not None else "not measured yet"
    if v is None and measured:
        v, known = measured[0], f"{measured[0]:.2f} ({measured[1]:.2f} to {measured[2]:.2f}) measured at K = {SHOWN_K}"
    for name in dict.fromkeys(r["name"] for r in rows if r["kind"] != "verify"):
        mine = [r for r in rows if r.get("name") == name]
        trained, timed = ([r for r in mine if r["kind"] == kind] for kind in ("train", "time"))
        width = mine[0]["width"]
        cells = [name, f"{mine[0]['parameters'] / 1e6:.1f}M", str(len(mine[0]["layers"]))]
        cells += [f"{width['hidden']} / {width['ffn']}" if width else "the target's"]
        before, after = ([r[when]["tau"][str(SHOWN_K)] for r in trained] for when in ("before", "after"))
        cells += [_span(before), _span(after), _span([r["after"]["top1"] for r in trained], 3)]
        c = timed[0]["share"] if timed else None
        cells += [f"{c[0]:.3f} ({c[1]:.3f} to {c[2]:.3f})" if c else ""]
        speed = 0.0
        if trained and c and v is not None:
            found = [best_speed(r["after"]["tau"], c[0], v, o) for r in trained]
            speed = mean(s for _, s in found)
            cells += ["/".join(str(K) for K in sorted({K for K, _ in found})), _span([s for _, s in found])]
        lines.append((speed, "| " + " | ".join(cells + [""] * (10 - len(cells))) + " |"))
    head = f"| shape | parameters | layers | hidden / FFN | τ before, K={SHOWN_K} | τ after | top-1 after "
    head += "| draft step c | best K | S |"
    body = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
    about = f"S = τ / (v + K·c + o), v = {known}, o = {o:g}; means over seeds (smallest to largest)."
    return "\n".join([about, "", head, "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|", *body, ""])


def _span(values: Sequence[float | None], digits: int = 2) -> str:
    known = [x for x in values if x is not None]
    if not known:
        return ""
    return f"{mean(known):.{digits}f} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="a folder, a .gguf file or a hub id")
    parser.add_argument("--train", type=Path, help="answers to train on")
    parser.add_argument("--heldout", type=Path, help="answers to score on")
    parser.add_argument("--out", type=Path, required=True, help="results.jsonl, table.md and the untrained drafters")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="layers at full width; 3 sizes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--trainable", choices=["all", "layers"], default="all", help="layers: embedding and head stay")
    parser.add_argument("--texts", type=int, default=64, help="training answers that channels are chosen on")
    parser.add_argument("--verify", type=float, help="v: a verify step in target steps, in place of the measured one")
    parser.add_argument("--overhead", type=float, default=0.0, help="o: the rest of a round in target steps")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--train-only", action="store_true")
    only.add_argument("--time-only", action="store_true")
    args = parser.parse_args(argv)
    if not args.time_only and not (args.train and args.heldout):
        parser.error("training needs --train and --heldout; without them give --time-only")
    target = resolve(args.target)
    shapes = shapes_of(target, args.sizes)
    if not args.time_only:
        train_all(args, target, shapes)
    if not args.train_only:
        with open_timer(os.environ, args.out / "engine.log") as timer:
            time_all(args, target, shapes, timer)
    text = table(read_jsonl(args.out / "results.jsonl"), args.verify, args.overhead)
    write_text(args.out / "table.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
