"""A drafter that drafts one by one against one that also drafts all in one pass: same data, steps and shape, served in turns.

python -m scripts.bench_parallel --name orders --train orders --heldout orders --limit 1000 --out runs/bench/parallel
python -m scripts.bench_parallel --name gsm8k --train train.jsonl --heldout test.jsonl --max-tokens 160 --out runs/bench/parallel
python -m scripts.bench_parallel --name code --train functions --heldout humaneval --max-tokens 96 --out runs/bench/parallel

Prompts are what `generate` takes, or "functions": HumanEval-style prompts of the documented functions of Python's own library,
read from the installed one. Per seed and depth both drafters train for the same steps; `plan` measures the cost of a round for
each K both ways, and each drafter is served at the K that its replay and these costs make fastest, in turns with the target
alone and, at the largest depth, the n-gram proposer, which knows no depth. Every part is a verb of its own and is not run again
when it is there; delete a folder to run it anew.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from distill.prompts import HUMANEVAL
from pairing.files import read_json, read_jsonl, write_text
from pairing.vllm_plugin import die_with_parent
from scripts.bench_common import MATMUL_PRECISIONS, ROOT, Row, cores, table

WORDS = (12, 120)  # of a docstring that makes a prompt


def main(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--name", required=True, help="of the domain: a folder in --out")
    made.add_argument("--train", required=True, help="prompts: what `generate` takes, or: functions")
    made.add_argument("--heldout", required=True, help="other prompts")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    made.add_argument("--limit", type=int, default=400, help="training prompts")
    made.add_argument("--heldout-limit", type=int, default=60, help="held-out prompts, whose replay chooses K")
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--steps", type=int, default=200, help="of each training: the equal budget")
    made.add_argument("--depth", type=int, nargs="+", default=[5], help="layers kept, those of most influence")
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--masks", type=int, default=8, help="the longest round in one pass that is trained")
    made.add_argument("--lookup", type=int, default=4, help="K of the n-gram proposer")
    made.add_argument("--measured", type=int, default=24, help="held-out prompts that are served")
    made.add_argument("--temperature", type=float, default=0.0, help="of the answers")
    made.add_argument("--served-at", type=float, nargs="+", default=[0.0, 0.7], help="temperatures")
    made.add_argument("--matmul-precision", choices=MATMUL_PRECISIONS, default="highest", help="of distill")
    made.add_argument("--jobs", type=int, default=2, help="trainings at a time, which share out the cores")
    made.add_argument("--train-only", action="store_true", help="no steps timed, nothing served: on a busy machine")
    args = made.parse_args(argv)
    domain = args.out / args.name
    answers(args, domain)
    for depth in args.depth:
        draft = domain / f"draft-{depth}"
        verb(draft, "init", f"target={args.target}", f"count={depth}", "by=influence", f"answers={domain / 'answers' / 'train'}",
             "mask_token=auto", f"out={draft}")  # fmt: skip
    runs = [(depth, seed) for depth in args.depth for seed in args.seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(
            pool.map(
                lambda run: train(args, domain, *run), [(*run, way) for run in runs for way in ("one", "parallel")]
            )
        )
    for depth, seed in runs if not args.train_only else []:
        serve(args, domain, depth, seed)
    served = sorted(domain.glob("served-*/results.jsonl"))
    print(report(args.name, {file.parent.name.removeprefix("served-"): read_jsonl(file) for file in served}))
    return 0


def answers(args: argparse.Namespace, domain: Path) -> None:
    train = args.train
    if train == "functions":
        file = domain / "functions.jsonl"
        if not file.is_file():
            rows = [{"prompt": HUMANEVAL.format(code=code)} for code in functions(Path(sysconfig.get_path("stdlib")))]
            write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
        train = str(file)
    words = [f"target={args.target}", f"out={domain / 'answers'}", f"temperature={args.temperature}"]
    for name, prompts, limit in (("train", train, args.limit), ("heldout", args.heldout, args.heldout_limit)):
        split = {"orders": {"train": "train", "heldout": "test"}[name]}.get(prompts)
        words += [
            f"sets.{name}.prompts={prompts}",
            f"sets.{name}.limit={limit}",
            f"sets.{name}.max_tokens={args.max_tokens}",
        ]
        words += [f"sets.{name}.split={split}"] if split else []
    made = domain / "answers" / "heldout" / "meta.json"
    if not (made.is_file() and read_json(made)["complete"]):
        verb(None, "generate", *words)


def train(args: argparse.Namespace, domain: Path, depth: int, seed: int, way: str) -> None:
    out = trained(domain, depth, seed, way).parent
    words = [f"draft={domain / f'draft-{depth}'}", f"data={domain / 'answers' / 'train'}", f"out={out}"]
    words += [
        f"heldout.own={domain / 'answers' / 'heldout'}",
        f"max_steps={args.steps}",
        f"seed={seed}",
        "objective=auto",
    ]
    # the whole held-out set is scored once, at the end: rounds in one pass from every token take as long as many steps
    words += [f"num_speculative_tokens={args.masks}", f"eval_every={args.steps}", "eval_prompts=16"]
    words += [f"parallel_drafting={args.masks}"] if way == "parallel" else []
    words += [f"matmul_precision={args.matmul_precision}"]
    words += [f"threads={max(1, cores() // args.jobs)}"]  # more than the cores would spin against each other
    verb(out / "evaluation.json", "distill", *words)


def trained(domain: Path, depth: int, seed: int, way: str) -> Path:
    return domain / f"{way}-{depth}-{seed}" / "drafter"


def serve(args: argparse.Namespace, domain: Path, depth: int, seed: int) -> None:
    one, parallel = (trained(domain, depth, seed, way) for way in ("one", "parallel"))
    planned = domain / f"plan-{depth}.json"
    heldout = domain / "answers" / "heldout"
    ks = list(range(1, args.masks + 1))
    verb(planned, "plan", args.target, f"answers={heldout}", f"drafter={parallel}", "layers=[]", "batch_sizes=[1]",
         f"num_speculative_tokens={ks}", f"out={planned}")  # fmt: skip
    costs = read_json(planned)["batches"][0]
    K_one = fastest(read_json(one.parent / "evaluation.json")["sets"]["own"]["after"]["tau"], costs["foretold"])
    K_par = fastest(
        read_json(parallel.parent / "evaluation.json")["sets"]["own"]["parallel"]["after"]["tau"],
        costs["foretold_parallel"],
    )
    out = domain / f"served-{depth}-{seed}"
    verb(out / "results.jsonl", "measure", f"target={args.target}", f"drafters.one={one}", f"drafters.both={parallel}",
         f"workloads.own.answers={heldout}", f"workloads.own.limit={args.measured}",
         f"workloads.own.max_tokens={args.max_tokens}", f"num_speculative_tokens={K_one}",
         f"parallel_num_speculative_tokens={K_par}", f"temperatures={args.served_at}", "enforce_eager=true", "repeats=1",
         f"lookup_num_speculative_tokens={args.lookup}",
         f"arms=[one,both-parallel{',ngram' * (depth == max(args.depth))}]", f"out={out}")  # fmt: skip


def fastest(tau: Mapping[str, float | None], rounds: Mapping[str, Mapping[str, float]]) -> int:
    """The K of the most τ a round's cost."""
    speeds = {int(K): t / rounds[K]["round"] for K, t in tau.items() if t is not None and K in rounds}
    return max(speeds, key=lambda K: speeds[K])


def functions(library: Path) -> Iterator[str]:
    """The head and docstring of every documented function of a folder of Python files, as HumanEval shows them."""
    for file in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef) or not (said := ast.get_docstring(node)):
                continue
            if node.args.args[:1] and node.args.args[0].arg in ("self", "cls"):
                continue  # a method is not understood without its class
            if WORDS[0] <= len(said.split()) <= WORDS[1]:
                head = f"def {node.name}({ast.unparse(node.args)}):"
                yield f'{head}\n    """{textwrap.indent(said, "    ").strip()}\n    """\n'


def verb(made: Path | None, *words: str) -> None:
    """Runs a verb unless what it makes is there. 1 is a verb's answer "no", which is a result too."""
    if made is not None and made.exists():
        return
    print(f"draftsmith {' '.join(words)}", file=sys.stderr, flush=True)
    line = [sys.executable, "-m", f"recipes.{words[0]}", *words[1:]]
    code = subprocess.run(line, cwd=ROOT, preexec_fn=die_with_parent, stdout=sys.stderr).returncode
    if code not in (0, 1):
        raise SystemExit(f"bench_parallel: {words[0]} ended with code {code}; the same command goes on from there")


def report(name: str, runs: Mapping[str, Sequence[Row]]) -> str:
    """Markdown: a line an arm, run ("DEPTH-SEED") and temperature."""
    lines = []
    for run, rows in runs.items():
        for row in rows:
            if row["group"] is None and row["kind"] != "target":
                head = [name, run, f"{row['temperature']:g}", row["arm"], str(row["num_speculative_tokens"])]
                lines.append([*head, _speed(row), *_counts(row)])
    header = ("domain", "depth-seed", "temperature", "arm", "K", "speed (95 %)", "τ served", "τ by replay", "identical")
    return "\n\n".join([table(header, lines), *over_seeds(name, runs)])


def over_seeds(name: str, runs: Mapping[str, Sequence[Row]]) -> list[str]:
    """Markdown, where a depth has several seeds: each arm's mean over them, in brackets the least and the most."""
    cells: dict[tuple[str, float, str], list[Row]] = {}
    for run, rows in runs.items():
        for row in rows:
            if row["group"] is None and row["kind"] != "target" and not row["void"] and row["speedup"] is not None:
                cells.setdefault((run.partition("-")[0], row["temperature"], row["arm"]), []).append(row)
    lines = []
    for (depth, temperature, arm), rows in sorted(cells.items()):
        if len(rows) > 1:
            ks = sorted({row["num_speculative_tokens"] for row in rows})
            figures = [_spread([row[key] for row in rows]) for key in ("speedup", "acceptance_length")]
            lines.append([name, depth, str(len(rows)), f"{temperature:g}", arm, ", ".join(map(str, ks)), *figures])
    return [table(("domain", "depth", "seeds", "temperature", "arm", "K", "speed", "τ served"), lines)] if lines else []


def _spread(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]  # no τ where nothing was drafted
    if not known:
        return "–"
    return f"{mean(known):.2f} ({min(known):.2f}–{max(known):.2f})"


def _speed(row: Row) -> str:
    if row["void"] or row["speedup"] is None:
        return f"void: {row['void']}"
    low, high = row["speedup_interval"]
    return f"{row['speedup']:.2f}x ({low:.2f}–{high:.2f})"


def _counts(row: Row) -> list[str]:
    figures: list[Any] = [row["acceptance_length"], row["replay_acceptance_length"], row["exact_match"]]
    return ["–" if x is None else f"{x:.2f}" for x in figures]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
