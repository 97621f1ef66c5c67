"""Our training engine against a plain PyTorch loop and against TRL's GKD trainer: speed, memory, acceptance, and the floor.

python -m scripts.bench_distill --smoke --out runs/bench/smoke.jsonl
python -m scripts.bench_distill --draft runs/bench/draft --train runs/bench/answers/train \\
    --heldout runs/bench/answers/heldout --out runs/bench/distill.jsonl

Every run is a process of its own, contenders take turns, and lines that --out holds already are not run again. All contenders
train the same rows in the same batches and order, the same parameters, in float32, with the same AdamW, schedule and
clipping, on the forward KL from the target over the supervised positions:

  ours-online   our loop, target and drafter in it
  ours-cached   our loop, the target's recorded distribution in its place
  plain         both models' whole [batch, length, vocabulary] logits, F.kl_div at the supervised positions
  trl           trl.experimental.gkd.GKDTrainer, lmbda = 0, beta = 0, with TRL's own collator, no gradient checkpointing

Shapes: B rows, L columns, N supervised positions, V vocabulary rows, H hidden.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from distill.batches import Batch, Rows
from distill.options import give_back_memory, own_weights
from distill.student import freeze
from pairing.errors import InputError
from pairing.source import load_model, load_tokenizer, resolve
from scripts import bench_common as common
from scripts.bench_common import Row, spec, table

CONTENDERS = ("ours-online", "ours-cached", "plain", "trl")
RIVALS = ("plain", "trl")
GIB = 1024**3
INSTALL_TRL = "pip install -e '.[bench]', or name an interpreter that has it with --trl-python"
HAS_TRL = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"


# ---- the parent ----


def main(argv: Sequence[str]) -> int:
    made = common.parser((__doc__ or "").splitlines()[0])
    made.add_argument("--smoke", action="store_true", help="tiny random models, a minute: does it all run?")
    made.add_argument("--case", default="orders", help="what to call this pair and data in the results")
    made.add_argument(
        "--steps", type=int, default=6, help="optimizer steps of a run; the first is not timed; 0 leaves the case out"
    )
    made.add_argument(
        "--alpha-steps", type=int, default=24, help="steps of the first run of each contender, which is scored"
    )
    made.add_argument("--wide-steps", type=int, default=4, help="the same with 151,936 rows; 0 leaves that case out")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--contenders", default=",".join(CONTENDERS))
    made.add_argument("--trl-python", default=sys.executable, help=f"interpreter that has TRL: {INSTALL_TRL}")
    made.add_argument("--wide-folder", type=Path, default=Path("runs/bench/wide"), help="where the wide pair is kept")
    return common.start("bench_distill", argv, made, child, run, report)


def run(args: Any) -> list[Row]:
    contenders = args.contenders.split(",")
    if unknown := set(contenders) - set(CONTENDERS):
        raise InputError(
            f"--contenders: {', '.join(sorted(unknown))}: one or more of {', '.join(CONTENDERS)} are there"
        )
    if "trl" in contenders and subprocess.run([args.trl_python, "-c", HAS_TRL]).returncode:
        raise InputError(f"TRL is not installed in {args.trl_python}: {INSTALL_TRL}, or leave it out: --contenders "
                         "ours-online,ours-cached,plain")  # fmt: skip
    cases = []
    if args.smoke:
        args.steps, args.alpha_steps, args.wide_steps, args.repeats = 3, 6, 3, 1
        folder = args.wide_folder.parent / "smoke"
        cases += [("tiny", common.random_pair(folder / "tiny", **common.TINY), args.steps, args.alpha_steps)]
        cases += [
            ("tiny wide", common.random_pair(folder / "wide", **common.TINY_WIDE), args.wide_steps, args.wide_steps)
        ]
    else:
        common.require(args, "draft", "train", "heldout")
        target = str(resolve(args.target).path)
        pair = {"target": target, "draft": str(args.draft), "train": str(args.train), "heldout": str(args.heldout)}
        if args.steps:
            cases += [(args.case, pair, args.steps, args.alpha_steps)]
        if args.wide_steps:
            cases += [
                ("151,936 rows", common.random_pair(args.wide_folder, **common.WIDE), args.wide_steps, args.wide_steps)
            ]
    same = {"batch_size": args.batch_size, "lr": args.lr, "trainable": args.trainable}
    same["matmul_precision"] = args.matmul_precision
    specs = []
    for case, pair, steps, _ in cases:
        specs += [spec(case=case, contender="floor", repeat=0, steps=steps, **pair, **same)]
    for repeat in range(args.repeats):
        for case, pair, steps, alpha_steps in cases:
            count = alpha_steps if repeat == 0 else steps
            specs += [
                spec(case=case, contender=name, repeat=repeat, steps=count, **pair, **same) for name in contenders
            ]
    python = {"trl": args.trl_python}
    return common.run_children(
        "scripts.bench_distill", specs, args.out, threads=args.threads or common.cores(),
        python=lambda s: python.get(s["contender"], sys.executable),
    )  # fmt: skip


# ---- a child: one contender, once ----


def child(task: Row) -> Row:
    common.settle(task)
    draft = load_model(Path(task["draft"]))
    rows = common.load_rows(Path(task["train"]), draft, "train")
    steps = common.batches(rows, steps=task["steps"], batch_size=task["batch_size"], seed=0)
    if task["contender"] == "floor":
        return floor(task, draft, steps)
    target = None if task["contender"] == "ours-cached" else load_model(Path(task["target"])).requires_grad_(False)
    if task["contender"].startswith("ours"):  # as the recipe loads them
        own_weights(draft)
        target = target and own_weights(target)
    params = [p for _, p in freeze(draft, task["trainable"])]
    models = sum(p.nbytes for m in (draft, target) if m is not None for p in m.parameters())
    if task["contender"] == "trl":
        import trl.experimental.gkd  # noqa: F401  its libraries are not what training needs
    for weights in (p for m in (draft, target) if m is not None for p in m.parameters()):
        weights.sum()  # weights are mapped from their file and not resident before they are read
    before = memory_now()
    forget_peak()
    cpu = time.process_time()
    ends = TRAIN[task["contender"]](task, draft, target, rows, steps, params)
    cpu, peak = time.process_time() - cpu, memory_peak()
    lengths = [[len(ids) for ids, _ in common.sequences(b)] for b in steps]
    tokens = [sum(row) for row in lengths]
    supervised = [len(b.row_N) for b in steps]
    seconds = ends[-1] - ends[0]  # from the end of the first step, which warms up
    result: Row = {
        "tokens": sum(tokens),
        "supervised_tokens": sum(supervised),
        "timed_steps": len(steps) - 1,
        "seconds": seconds,
        "cpu_seconds": cpu,  # of all steps and threads: what to look at where the machine was not left alone
        "tokens_per_s": sum(tokens[1:]) / seconds,
        "supervised_per_s": sum(supervised[1:]) / seconds,
        "trained_parameters": sum(p.numel() for p in params),
        "model_bytes": models,
        "ready_bytes": before,
        "peak_bytes": peak,
        "machine": common.machine(task["threads"]),
        "said": f"{sum(tokens[1:]) / seconds:.0f} tokens/s, peak {peak / GIB:.2f} GiB",
    }
    if task["repeat"] == 0:
        del target
        result["scores"] = common.scored(
            draft, common.load_rows(Path(task["heldout"]), draft, "held-out"), Accelerator(cpu=True)
        )
    return result


Ends = list[float]  # seconds at the end of each step, from any start


def ours(task: Row, draft: Any, target: Any, rows: Rows, steps: Sequence[Batch], params: Sequence[Any]) -> Ends:
    give_back_memory()  # as the recipe does
    done = common.train(
        draft, rows, losses={"forward_kl": 1.0}, steps=len(steps), batch_size=task["batch_size"], lr=task["lr"], seed=0,
        trainable=task["trainable"], target=target, accelerator=Accelerator(cpu=True),
    )  # fmt: skip
    return [row["seconds"] for row in done]


def plain(task: Row, draft: Any, target: Any, rows: Rows, steps: Sequence[Batch], params: Sequence[Any]) -> Ends:
    """What one writes without a library."""
    optimizer, scheduler = _optimizer(task, params, len(steps))
    draft.train()
    target.eval()
    ends = []
    for batch in steps:
        with torch.no_grad():
            target_BLV = target(input_ids=batch.input_BL).logits
        draft_BLV = draft(input_ids=batch.input_BL).logits
        logp_NV = target_BLV[batch.row_N, batch.column_N].log_softmax(-1)
        logq_NV = draft_BLV[batch.row_N, batch.column_N].log_softmax(-1)
        loss = F.kl_div(logq_NV, logp_NV, reduction="batchmean", log_target=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, common.CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(time.perf_counter())
    return ends


def trl(task: Row, draft: Any, target: Any, rows: Rows, steps: Sequence[Batch], params: Sequence[Any]) -> Ends:
    """The rows go in as chats that carry their token ids, so that TRL trains the very same tokens as the others."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    examples = []
    for batch in steps:
        for ids, start in common.sequences(batch):
            mask = [0] * start + [1] * (len(ids) - start)
            chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
            examples.append({"messages": chat, "input_ids": ids, "completion_mask": mask})
    ends: Ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.perf_counter())

    args = GKDConfig(
        output_dir=str(Path(task["result"]).parent / "trl"), per_device_train_batch_size=task["batch_size"],
        max_steps=len(steps), lmbda=0.0, beta=0.0, temperature=1.0, max_grad_norm=common.CLIP, bf16=False,
        gradient_checkpointing=False, train_sampling_strategy="sequential", max_length=None, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    trainer = GKDTrainer(
        model=draft, teacher_model=target, args=args, train_dataset=Dataset.from_list(examples),
        processing_class=load_tokenizer(Path(task["target"])), callbacks=[Clock()],
        optimizers=_optimizer(task, params, len(steps)),
    )  # fmt: skip
    trainer.train()
    return ends


def _optimizer(task: Row, params: Sequence[Any], steps: int) -> tuple[Any, Any]:
    """Our loop's own optimizer and rate: linear up and down, each step at its middle."""
    optimizer = torch.optim.AdamW(params, lr=task["lr"], betas=(0.9, common.BETA2), weight_decay=0.0, fused=True)

    def rate(step: int) -> float:
        progress = (step + 0.5) / steps
        return max(0.0, min(progress / common.WARMUP, (1 - progress) / (1 - common.WARMUP)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


TRAIN: dict[str, Callable[..., Ends]] = {"ours-online": ours, "ours-cached": ours, "plain": plain, "trl": trl}


# ---- memory of this process ----


def memory_now() -> int:
    return _status("VmRSS")


def memory_peak() -> int:
    """Most bytes resident since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Loading reads weights twice over; what training needs is asked for here (Linux's /proc/self/clear_refs, proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


# ---- the floor ----


def floor(task: Row, draft: Any, steps: Sequence[Batch]) -> Row:
    """Seconds of a mean step's matrix products alone, each timed here at its own shape.

    Counted is what no engine can leave out: tokens without padding, a prompt's beginning that a batch shares once, logits at
    supervised positions only. Attention's own products are left out, which sets the floor lower and never higher.
    """
    target = load_model(Path(task["target"])).config
    alone = [b.shared + sum(len(ids) - 1 - b.shared for ids, _ in common.sequences(b)) for b in steps]
    T, N = round(sum(alone) / len(steps)), round(sum(len(b.row_N) for b in steps) / len(steps))
    tokens = sum(len(ids) for b in steps for ids, _ in common.sequences(b)) / len(steps)
    head = (N, draft.config.hidden_size, draft.config.vocab_size)
    learner = backward(linears(draft.config, T)) + backward([head], weights=task["trainable"] == "all")
    teacher = [*linears(target, T), (N, target.hidden_size, target.vocab_size)]
    timed = {shape: seconds_of(*shape) for shape in {*learner, *teacher}}
    cached = sum(timed[s] for s in learner)
    online = cached + sum(timed[s] for s in teacher)
    # a loop with whole logits multiplies every column, padding too, through both heads
    M = round(sum(b.input_BL.numel() for b in steps) / len(steps))
    whole = backward(linears(draft.config, M)) + backward([(M, *head[1:])], weights=task["trainable"] == "all")
    whole += [*linears(target, M), (M, target.hidden_size, target.vocab_size)]
    flops = {"cached": _flops(learner), "online": _flops([*learner, *teacher]), "whole logits": _flops(whole)}
    return {
        "step_tokens": tokens,
        "decoder_tokens": T,
        "supervised": N,
        "gflop": {k: v / 1e9 for k, v in flops.items()},
        "seconds": {"cached": cached, "online": online},
        "tokens_per_s": {"cached": tokens / cached, "online": tokens / online},
        "machine": common.machine(task["threads"]),
        "said": f"at most {tokens / cached:.0f} tokens/s cached, {tokens / online:.0f} online, "
        f"{flops['online'] / online / 1e9:.0f} GFLOP/s",
    }


Shape = tuple[int, int, int]  # m, k, n of an [m, k] by [k, n] product


def linears(config: Any, T: int) -> list[Shape]:
    """The products of a Llama-like decoder's linear layers for T tokens, forward."""
    H, ffn = config.hidden_size, config.intermediate_size
    width = getattr(config, "head_dim", None) or H // config.num_attention_heads
    q, kv = width * config.num_attention_heads, width * config.num_key_value_heads
    layer = [(T, H, q), (T, H, kv), (T, H, kv), (T, q, H), (T, H, ffn), (T, H, ffn), (T, ffn, H)]
    return layer * config.num_hidden_layers


def backward(forward: Sequence[Shape], weights: bool = True) -> list[Shape]:
    """Forward, the gradient by the input, and by the weight where it learns."""
    by_input = [(m, n, k) for m, k, n in forward]
    by_weight = [(n, m, k) for m, k, n in forward] if weights else []
    return [*forward, *by_input, *by_weight]


def seconds_of(m: int, k: int, n: int, budget_s: float = 0.5) -> float:
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    torch.mm(a, b, out=out)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 50):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - started)
    return min(times)


def _flops(shapes: Sequence[Shape]) -> int:
    return sum(2 * m * k * n for m, k, n in shapes)


# ---- the report ----


def report(results: Sequence[Row]) -> str:
    """Markdown: speed and memory, acceptance at equal tokens, the floor, and the goals of issue 3."""
    parts = []
    for case in dict.fromkeys(row["case"] for row in results):
        rows = [row for row in results if row["case"] == case and "error" not in row]
        runs = {name: [r for r in rows if r["contender"] == name] for name in CONTENDERS}
        runs = {name: found for name, found in runs.items() if found}
        least = next((r for r in rows if r["contender"] == "floor"), None)
        parts += [f"### {case}", speed_table(runs, least), acceptance_table(runs), *goals(runs)]
    failed = [f"- {common.name_of(row)}: {row['error']}" for row in results if "error" in row]
    return "\n\n".join([p for p in parts if p] + (["Failed:\n" + "\n".join(failed)] if failed else []))


def speed_table(runs: dict[str, list[Row]], least: Row | None) -> str:
    lines = []
    for name, found in runs.items():
        rates = [r["tokens_per_s"] for r in found]
        best = least and least["tokens_per_s"]["cached" if name == "ours-cached" else "online"]
        rival = max((middle(runs[r], "tokens_per_s") for r in RIVALS if r in runs), default=None)
        above = [added(r) / GIB for r in found]
        lines.append(
            (
                name,
                f"{median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})",
                f"{middle(found, 'supervised_per_s'):,.0f}",
                f"{median(rates) / rival:.2f}x" if rival else "–",
                f"{median(rates) / best:.0%}" if best else "–",
                f"{middle(found, 'model_bytes') / GIB:.2f}",
                f"{middle(found, 'peak_bytes') / GIB:.2f}",
                f"{median(above):.2f} ({min(above):.2f}–{max(above):.2f})",
            )
        )
    header = ("engine", "tokens/s (least–most)", "supervised tokens/s", "against the faster rival", "of the floor's rate",
              "models GiB", "peak GiB", "of it added by training GiB")  # fmt: skip
    if least is None:
        return table(header, lines)
    note = (
        f"Floor (matrix products alone): {least['seconds']['online']:.2f} s a step online, {least['seconds']['cached']:.2f} s "
        f"cached, for {least['step_tokens']:.0f} tokens a step, of which {least['supervised']} supervised and "
        f"{least['decoder_tokens']} through the layers. Products of a step: {least['gflop']['online']:.0f} GFLOP online, "
        f"{least['gflop']['cached']:.0f} cached, {least['gflop']['whole logits']:.0f} with whole logits."
    )
    return table(header, lines) + "\n\n" + note


def acceptance_table(runs: dict[str, list[Row]]) -> str:
    """Held-out figures after equal tokens, and each engine less the plain loop."""
    found = {name: r for name, rows in runs.items() for r in rows if "scores" in r}
    lines = []
    for name, row in found.items():
        m = common.means(row["scores"])
        cells = [
            name,
            f"{row['tokens']:,}",
            f"{m['top1']:.3f}",
            f"{m['alpha_low']:.3f}–{m['alpha_high']:.3f}",
            f"{m['tau']:.3f}",
        ]
        for figure in ("top1", "alpha_high", "tau"):
            if name == "plain" or "plain" not in found:
                cells.append("–")
            else:
                cells.append(
                    "{:+.3f} ({:+.3f} to {:+.3f})".format(
                        *common.difference(figure, [row["scores"]], [found["plain"]["scores"]])
                    )
                )
        lines.append(cells)
    header = ("engine", "tokens trained", "top-1", "α", f"τ, K = {common.K}", "top-1 less plain's", "α", "τ")
    return table(header, lines) if lines else ""


def goals(runs: dict[str, list[Row]]) -> list[str]:
    rivals = [runs[r] for r in RIVALS if r in runs]
    if not rivals:
        return []
    rate = max(middle(r, "tokens_per_s") for r in rivals)
    memory = min(median(map(added, r)) for r in rivals)
    said = []
    for name, factor in (("ours-online", 2), ("ours-cached", 5)):
        if name in runs:
            faster = middle(runs[name], "tokens_per_s") / rate
            above = median(map(added, runs[name])) / memory
            said.append(
                f"- {name}: {faster:.2f}x the faster rival (goal {factor}x: {_met(faster >= factor)}); "
                f"{above:.2f} of the smaller rival's memory above the models (goal 1/3: {_met(above <= 1 / 3)})"
            )
    return ["\n".join(said)] if said else []


def added(row: Row) -> int:
    """Peak memory above the models' own: what was resident once libraries and models were loaded is taken off."""
    return int(row["peak_bytes"] - row["ready_bytes"])


def _met(met: bool) -> str:
    return "met" if met else "NOT met"


def middle(rows: Sequence[Row], field: str) -> float:
    return float(median(row[field] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
