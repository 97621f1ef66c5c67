"""Whether a training step on the GPU is the step that the CPU takes, and what its head costs there in time and memory.

python -m scripts.gpu_parity --smoke --out runs/gpu                     # tiny shapes, on a GPU or, without one, the CPU
python -m scripts.gpu_parity --out runs/gpu --draft DRAFT --train ANSWERS      # one GPU, about 2 minutes

Writes parity.jsonl, a line per check or measured cell as it ends, and parity.md. A check's error is relative, ‖a − b‖ / ‖b‖;
exit 1 where one is over its limit, 3 where one broke. float32 products are float32 here (no TF32). Neither vLLM nor a network
is needed.

Shapes: N supervised positions, V vocabulary rows, H hidden, K ids of the target's head, M draws from outside it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from distill.batches import Batch, Rows, collate, to_device, windows
from distill.head import REPORTED, AnySignal, Head, head_loss
from distill.losses import LOSSES, NEED_ALL, FullSignal, Outcomes, Signal
from distill.mask_blocks import Parallel, with_blocks
from distill.options import checkpoint_layers, compile_layers, decoder_autocast
from distill.settings import Settings
from distill.signals import get_signal, online
from distill.step import ready, window_gradients
from distill.student import freeze, supervised_hidden
from pairing.files import append_jsonl, read_jsonl, write_text
from pairing.source import load_model
from scripts import bench_common as common

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FLOAT32 = 5e-5  # largest relative error that rounding and another order of summation may make; 1e-6 on a CPU
BF16 = 0.1  # of a gradient, or of hidden states, whose decoder runs in bf16
MASK = (
    common.TINY["rows"] - 1
)  # an id like any other to the tiny pair: what is taken for a mask matters nothing to parity
LOSS = {"forward_kl": 1.0, "cross_entropy": 0.1}  # of a step that is timed or compared
Row = dict[str, Any]
Gradients = dict[str, torch.Tensor]


# ---- what all checks share ----


def relative(got: torch.Tensor, true: torch.Tensor) -> float:
    """‖got − true‖ / ‖true‖, in float64; the norm of `got` where `true` is 0."""
    got, true = got.detach().double().cpu(), true.detach().double().cpu()
    size = float(true.norm())
    return float((got - true).norm()) / (size or 1.0)


def compared(got: Gradients, true: Gradients) -> float:
    """The relative error of all gradients together."""
    assert got.keys() == true.keys(), set(got) ^ set(true)
    flat = [torch.cat([g[name].double().cpu().reshape(-1) for name in sorted(true)]) for g in (got, true)]
    return relative(flat[0], flat[1])


def milliseconds(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The median time of `work` after one to warm up, and the peak of allocated GPU memory above the start, in MiB."""
    work()
    before = 0
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if CUDA else 0.0
    return sorted(times)[len(times) // 2], peak


def checked(check: str, case: str, error: float, limit: float, **more: Any) -> Row:
    return {"check": check, "case": case, "error": error, "limit": limit, "ok": error <= limit} | more


# ---- (a) the head: every loss, both signals, several blocks ----


def problem(
    N: int, V: int, H: int, K: int, M: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, Signal, FullSignal]:
    """Hidden states, the head's matrix, and a target as the cache knows it and whole; made on the CPU, from a seed."""
    g = torch.Generator().manual_seed(0)
    hidden_NH, theirs_NH = (torch.randn(N, H, generator=g) for _ in range(2))
    weight_VH = torch.randn(V, H, generator=g) * 2 / H**0.5
    p_NV = (theirs_NH @ weight_VH.T).softmax(-1)
    top = p_NV.topk(K)
    answer_N = torch.multinomial(p_NV, 1, generator=g).squeeze(-1)
    draws_NM = torch.multinomial(p_NV.scatter(-1, top.indices, 0.0), M, True, generator=g)
    tail_N = p_NV.scatter(-1, top.indices, 0.0).sum(-1)
    signal = Signal(answer_N, top.indices, top.values.log(), tail_N, draws_NM, p_NV.gather(-1, draws_NM).log())
    signal = Signal(*(part.to(device) for part in vars(signal).values()))
    weight = weight_VH.to(device)
    return hidden_NH.to(device), weight, signal, FullSignal(signal.answer_N, theirs_NH.to(device), weight)


def whole_loss(name: str, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, signal: AnySignal) -> torch.Tensor:
    """The reference: all logits at once, summed over positions; differentiable, in the type of what it is given."""
    logq_NV = (hidden_NH @ weight_VH.T).log_softmax(-1)
    answer_N = logq_NV.gather(-1, signal.answer_N[:, None]).squeeze(-1)
    if isinstance(signal, FullSignal):
        logp, logq = (
            (signal.hidden_NH.to(logq_NV.dtype) @ signal.weight_VH.to(logq_NV.dtype).T).log_softmax(-1),
            logq_NV,
        )
        mass, top_N = logp.exp(), logq.gather(-1, logp.argmax(-1, keepdim=True)).squeeze(-1)
        alpha_N, above_N = torch.minimum(logp, logq).exp().sum(-1), (logq.exp() * (logp > logq)).sum(-1)
    else:
        head_logq = logq_NV.gather(-1, signal.head_ids_NK)
        head_logp, tail_N1 = signal.head_logp_NK.to(logq_NV.dtype), signal.tail_N.to(logq_NV.dtype)[:, None]
        if signal.tail_ids_NM is not None and signal.tail_logp_NM is not None:
            rest_p, rest_q = signal.tail_logp_NM.to(logq_NV.dtype), logq_NV.gather(-1, signal.tail_ids_NM)
            rest_mass = (tail_N1 / rest_p.shape[1]).expand_as(rest_p)
            known = (head_logq.exp() * (head_logp > head_logq)).sum(-1)
        else:
            outside = torch.ones_like(logq_NV, dtype=torch.bool).scatter(-1, signal.head_ids_NK, False)
            rest_p, rest_mass = tail_N1.log(), tail_N1
            rest_q = logq_NV.masked_fill(~outside, -torch.inf).logsumexp(-1, keepdim=True)
            known = (head_logq.exp() * (head_logp > head_logq)).sum(-1) + (rest_q.exp() * (rest_p > rest_q)).sum(-1)
        logp, logq = torch.cat([head_logp, rest_p], 1), torch.cat([head_logq, rest_q], 1)
        mass, top_N, above_N = torch.cat([head_logp.exp(), rest_mass], 1), head_logq[:, 0], known
        alpha_N = (mass * (logq - logp).clamp(max=0.0).exp()).sum(-1)
    outcomes = Outcomes(logp, logq, mass, answer_N, top_N, alpha_N.detach().clamp(max=1.0), above_N.detach())
    return LOSSES[name](outcomes).sum()


def head_checks(shapes: Sequence[Mapping[str, int]]) -> Iterator[Row]:
    """Loss and both gradients of every loss, in float32 on DEVICE against whole logits in float64 on the CPU."""
    for shape in shapes:
        here, there = problem(**shape, device="cpu"), problem(**shape, device=DEVICE)
        for name, kind in itertools.product(LOSSES, ("cache", "draws", "whole")):
            if name in NEED_ALL and kind != "whole":
                continue

            leaves = [t.double().requires_grad_() for t in here[:2]]
            true = whole_loss(name, leaves[0], leaves[1], _pick(here, kind))
            true_grads = torch.autograd.grad(true, leaves)
            V = shape["V"]
            for block in (V, V // 3 + 1):
                ours = [t.clone().requires_grad_() for t in there[:2]]
                loss, _ = head_loss(
                    ours[0], ours[1], _pick(there, kind), {name: 1.0}, Head(V, 33, block, {name: LOSSES[name]})
                )
                grads = torch.autograd.grad(loss, ours)
                errors = [relative(loss, true), *(relative(g, t) for g, t in zip(grads, true_grads, strict=True))]
                blocks = len(Head(V, 33, block).pieces(there[0]))
                case = f"{name}, {kind}, N {shape['N']}, V {V}, H {shape['H']}, {blocks} blocks"
                yield checked("head", case, max(errors), FLOAT32, loss_error=errors[0])


def _pick(made: tuple[torch.Tensor, torch.Tensor, Signal, FullSignal], kind: str) -> AnySignal:
    if kind == "whole":
        return made[3]
    return made[2] if kind == "draws" else replace(made[2], tail_ids_NM=None, tail_logp_NM=None)


# ---- (b) the shared prefix ----


def sharing(rows: Rows, count: int) -> Batch:
    """A batch whose rows begin alike, on the CPU."""
    batch = collate(rows, windows(rows, 0, 0, count)[0])
    shared = int(batch.column_N.min()) // 2
    ids_BL = batch.input_BL.clone()
    ids_BL[:, :shared] = ids_BL[:1, :shared]
    return replace(batch, input_BL=ids_BL, shared=shared)


def prefix_checks(draft: Path, rows: Rows) -> Iterator[Row]:
    """Hidden states and the layers' gradients: DEVICE against the CPU, and with the prefix shared against without."""
    batch = sharing(rows, 4)

    def gradients(device: torch.device | str, shared: int) -> Gradients:
        model = load_model(draft).to(device).train()
        params = freeze(model, "layers")
        hidden_NH = supervised_hidden(model, replace(to_device(batch, device), shared=shared))
        direction_NH = torch.randn(hidden_NH.shape, generator=torch.Generator().manual_seed(0)).to(device)
        (hidden_NH * direction_NH).sum().backward()
        return {name: p.grad for name, p in params if p.grad is not None} | {"hidden": hidden_NH.detach()}

    here, there = gradients("cpu", batch.shared), gradients(DEVICE, batch.shared)
    for part in ("hidden", "gradients"):
        named = [{n: g for n, g in found.items() if (n == "hidden") == (part == "hidden")} for found in (there, here)]
        yield checked("prefix", f"{part}, {batch.shared} shared columns, GPU to CPU", compared(*named), FLOAT32)
    yield checked("prefix", "shared to not shared", compared(there, gradients(DEVICE, 0)), FLOAT32)


# ---- (b2) masks of parallel drafting; not run on a GPU here yet ----


def mask_checks(draft: Path, rows: Rows) -> Iterator[Row]:
    """Hidden states and the layers' gradients at text and masks: in one pass on DEVICE, its prefix shared or not, against each
    block by itself on the CPU, an ordinary causal sequence without an attention mask of ours. And in bf16."""
    plain = sharing(rows, 4)

    def gradients(device: torch.device | str, shared: int, by_itself: bool = False, bf16: bool = False) -> Gradients:
        model = load_model(draft).to(device).train()
        params = freeze(model, "layers")
        batch = to_device(plain, device)  # blocks are made where they are used
        batch = replace(with_blocks(batch, torch.full_like(batch.row_N, 3), MASK), shared=shared)
        with decoder_autocast(torch.device(device), bf16):
            hidden_NH = alone(model, batch) if by_itself else supervised_hidden(model, batch)
        direction_NH = torch.randn(hidden_NH.shape, generator=torch.Generator().manual_seed(0)).to(device)
        (hidden_NH * direction_NH).sum().backward()
        return {name: p.grad for name, p in params if p.grad is not None} | {"hidden": hidden_NH.detach()}

    true = gradients("cpu", 0, by_itself=True)
    for shared in (plain.shared, 0):
        found = gradients(DEVICE, shared)
        yield checked("masks", f"hidden, {shared} shared columns, to blocks alone",
                      relative(found.pop("hidden"), true["hidden"]), FLOAT32)  # fmt: skip
        rest = {name: g for name, g in true.items() if name != "hidden"}
        yield checked("masks", f"gradients, {shared} shared columns, to blocks alone", compared(found, rest), FLOAT32)
    hidden = gradients(DEVICE, plain.shared, bf16=True)["hidden"]
    yield checked("bf16", "masks, hidden, bf16 to float32", relative(hidden, true["hidden"]), BF16)


def alone(model: Any, batch: Batch) -> torch.Tensor:
    """Hidden states [N, H] with the block of every position run by itself: the text so far, then its masks."""
    assert batch.blocks is not None
    plain, found = batch.blocks.plain, []
    for row, place in zip(batch.row_N.tolist(), batch.column_N.tolist(), strict=True):
        column, masks, width = place, 0, plain.input_BL.shape[1]
        if place >= width:
            column, masks = (int(t[row, place - width]) for t in (batch.blocks.start_BM, batch.blocks.offset_BM))
        ids_L = torch.cat([plain.input_BL[row, : column + 1], plain.input_BL.new_full((masks,), MASK)])
        found.append(model.get_decoder()(input_ids=ids_L[None]).last_hidden_state[0, -1])
    return torch.stack(found)


# ---- (c) one optimizer step's gradients, each mode; (d) in bf16 ----

MODES: dict[str, Row] = {
    "cached": {},
    "cached, all learn": {"trainable": "all"},
    "cached, survival": {"survival": "greedy"},
    "cached, filter": {"keep_share": 0.5},
    "online": {"online": True},
    "online, on-policy": {"online": True, "on_policy": 1.0},
    "masks, survival": {"parallel": Parallel(4, MASK, keep=0.8), "survival": "greedy"},
    "masks, online": {"parallel": Parallel(4, MASK), "online": True},
}


def settings_of(mode: Row, **more: Any) -> Settings:
    given: Row = {"trainable": "layers", "losses": LOSS} | {k: v for k, v in mode.items() if k != "online"} | more
    return Settings(
        seed=0, batch_size=8, accumulation=1, lr=1e-3, warmup=0.04, weight_decay=0.0, beta2=0.98, clip=1.0, chunk=256,
        epochs=None, max_steps=1, minutes=None, eval_every=9, eval_prompts=1, checkpoint_every=9, keep=1, **given,
    )  # fmt: skip


def accelerator(cpu: bool, precision: str = "no") -> Accelerator:
    """A new one: accelerate keeps the device and the precision of a process's first one otherwise."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=cpu, mixed_precision=precision)


def step(
    on: Accelerator, folders: Mapping[str, Path], rows: Rows, mode: Row, count: int, **more: Any
) -> Callable[[], Gradients]:
    """A function that computes the first window's gradients, from a draft that is loaded once."""
    model = load_model(folders["draft"]).to(on.device).train()
    settings = settings_of(mode, **more)
    params = freeze(model, settings.trainable)
    target = online(load_model(folders["target"]), "the target", on.device, on.device) if mode.get("online") else None
    reference = load_model(folders["target"]).to(on.device).eval() if settings.keep_share < 1 else None
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    if settings.compile:
        compile_layers(model)
    run = ready(on, model, rows, settings, get_signal(rows, target), reference)
    window = windows(rows, 0, 0, count)[0]

    def gradients() -> Gradients:
        window_gradients(run, window, LOSS, 1)
        found = {name: p.grad for name, p in params if p.grad is not None}
        model.zero_grad(set_to_none=True)  # or the next call would add to them, and its peak would not count them
        return found

    return gradients


def step_checks(folders: Mapping[str, Path], rows: Rows, count: int) -> Iterator[Row]:
    cpu: dict[str, Gradients] = {}
    found: dict[str, Gradients] = {}
    for place, results in ((False, found), (True, cpu)):
        on = accelerator(cpu=place)
        for name, mode in MODES.items():
            results[name] = {n: g.cpu() for n, g in step(on, folders, rows, mode, count)().items()}
    for name in MODES:
        yield checked("step", f"{name}, GPU to CPU", compared(found[name], cpu[name]), FLOAT32)
    on = accelerator(cpu=False, precision="bf16")
    for name in ("cached", "online"):
        error = compared(step(on, folders, rows, MODES[name], count)(), found[name])
        yield checked("bf16", f"{name}, bf16 to float32", error, BF16)


# ---- (e) options of a step: compile, gradient checkpointing ----


def option_checks(folders: Mapping[str, Path], rows: Rows, count: int, compile: bool, repeats: int) -> Iterator[Row]:
    """A step's time and memory: plain, checkpointed, compiled; in float32 and bf16, and the gradient against the plain one's."""
    supervised = int(rows.supervised_P[windows(rows, 0, 0, count)[0]].sum())
    for precision in ("no", "bf16"):
        on = accelerator(cpu=False, precision=precision)
        plain: Gradients = {}
        options: list[Row] = [{}, {"gradient_checkpointing": True}, *([{"compile": True}] if compile else [])]
        for option in options:
            work = step(on, folders, rows, {}, count, **option)
            started = time.perf_counter()
            gradients = {n: g.clone() for n, g in work().items()}
            if CUDA:
                torch.cuda.synchronize()
            first_s = time.perf_counter() - started
            plain = plain or gradients
            limit = FLOAT32 if precision == "no" else BF16
            ms, mib = milliseconds(work, repeats)
            name = f"{next(iter(option), 'plain')}, {'float32' if precision == 'no' else precision}"
            more = {"first_s": round(first_s, 2), "ms": round(ms, 3), "peak_mib": round(mib, 1), "rows": count}
            more |= {"supervised": supervised, "supervised_per_s": round(1e3 * supervised / ms)}
            yield checked("option", name, compared(gradients, plain), limit, **more)
            del work, gradients
            gc.collect()


# ---- (f) the head's time and memory ----


def head_costs(cells: Sequence[Row], repeats: int) -> Iterator[Row]:
    """Forward and backward of LOSS in chunks, against all logits at once, and against its matrix products alone."""
    made: tuple[Any, ...] = ()
    for cell in cells:
        shape = {"N": cell["N"], "V": cell["V"], "H": cell["H"]}
        row = {"cost": "head", **cell}
        try:
            if not made or made[0] != shape:
                made = ()
                made = (shape, *_random_head(**shape))
                row["product_ms"] = milliseconds(partial(torch.matmul, made[1], made[2].T), repeats)[0]
            _, hidden_NH, weight_VH, cached, full = made
            signal = full if cell["signal"] == "online" else cached
            leaves = [hidden_NH.requires_grad_(), weight_VH.requires_grad_(cell["learns"])]

            def work(cell: Row = cell, leaves: list[torch.Tensor] = leaves, signal: AnySignal = signal) -> None:
                if cell["chunk"] is None:
                    loss = sum(w * whole_loss(name, leaves[0], leaves[1], signal) for name, w in LOSS.items())
                else:
                    head = Head(cell["V"], cell["chunk"], cell["block"], {name: LOSSES[name] for name in REPORTED})
                    loss, _ = head_loss(leaves[0], leaves[1], signal, LOSS, head)
                loss.backward()
                for leaf in leaves:
                    leaf.grad = None

            ms, mib = milliseconds(work, repeats)
            row |= {"ms": round(ms, 3), "peak_mib": round(mib, 1)}
            del work
        except torch.cuda.OutOfMemoryError:
            row["ms"], row["peak_mib"] = None, None
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        yield row


def _random_head(N: int, V: int, H: int) -> tuple[torch.Tensor, torch.Tensor, Signal, FullSignal]:
    """As `problem`, made on DEVICE from random ids: only time and memory are looked at."""
    hidden_NH, theirs_NH = torch.randn(N, H, device=DEVICE), torch.randn(N, H, device=DEVICE)
    weight_VH = torch.randn(V, H, device=DEVICE) / H**0.5
    first_N1 = torch.randint(V - 32, (N, 1), device=DEVICE)
    ids_NK = first_N1 + torch.arange(32, device=DEVICE)
    logp_NK = torch.full((N, 32), 0.9 / 32, device=DEVICE).log()
    cached = Signal(ids_NK[:, 0], ids_NK, logp_NK, torch.full((N,), 0.1, device=DEVICE))
    return hidden_NH, weight_VH, cached, FullSignal(cached.answer_N, theirs_NH, weight_VH.clone())


def cells_of(N: int, rows: Sequence[int], widths: Sequence[int], chunks: Sequence[int]) -> list[Row]:
    """Small shapes first. Chunk None: all logits at once. The head learns at the middle chunk and whole only."""
    cells = []
    for H, V, learns, signal in itertools.product(widths, rows, (False, True), ("cached", "online")):
        some = chunks if not learns else chunks[len(chunks) // 2 :][:1]
        same = {"N": N, "V": V, "H": H, "learns": learns, "signal": signal, "block": 1 << 19}
        cells += [same | {"chunk": chunk} for chunk in (*some, None)]
    return cells


# ---- the report ----


def report(rows: Sequence[Row]) -> str:
    """Markdown: what was over its limit or broke, the largest error of each check, and the tables of time and memory."""
    checks = [row for row in rows if "check" in row]
    broken = [row for row in rows if "broke" in row]
    over = [row for row in checks if not row["ok"]]
    parts = [f"{len(checks)} checks, {len(over)} over their limit, {len(broken)} parts broke."]
    parts += [f"- over: {r['check']}, {r['case']}: {r['error']:.2e}, limit {r['limit']:.0e}" for r in over]
    parts += [f"- broke: {r['broke']}: {r['why']}" for r in broken]
    lines = []
    for name in dict.fromkeys(row["check"] for row in checks):
        mine = [row for row in checks if row["check"] == name]
        worst = max(mine, key=lambda row: row["error"])
        lines.append([name, len(mine), f"{worst['error']:.1e}", worst["case"]])
    parts += ["", common.table(("check", "cases", "largest error", "where"), lines)] if lines else []
    options = [row for row in checks if row["check"] == "option"]
    if options:
        header = ("a step", "ms", "supervised tokens/s", "peak MiB", "first call, s", "error to plain")
        lines = [
            [r["case"], r["ms"], r["supervised_per_s"], r["peak_mib"], r["first_s"], f"{r['error']:.1e}"]
            for r in options
        ]
        parts += ["", common.table(header, lines)]
    costs = [row for row in rows if "cost" in row]
    if costs:
        parts += ["", _cost_table(costs)]
    return "\n".join([*parts, ""])


def _cost_table(costs: Sequence[Row]) -> str:
    product: dict[Any, Any] = {}
    lines = []
    for row in costs:
        at = (row["V"], row["H"])
        product[at] = row["product_ms"] if "product_ms" in row else product.get(at)
        # logits and the hidden states' gradient; the head's gradient where it learns; the target's logits online
        floor = product[at] * (2 + row["learns"] + (row["signal"] == "online")) if product[at] is not None else None
        said = ["out of memory", ""] if row["ms"] is None else [f"{row['ms']:.1f}", f"{row['peak_mib']:.0f}"]
        names = [f"{row['V']:,} x {row['H']}", row["signal"], "learns" if row["learns"] else "frozen"]
        lines.append([*names, row["chunk"] or "whole", *said, f"{floor:.1f}" if floor is not None else ""])
    note = f"N = {costs[0]['N']:,} positions, float32, forward and backward; products: its matrix products alone."
    header = ("V x H", "signal", "head", "chunk", "ms", "peak MiB", "products, ms")
    return note + "\n\n" + common.table(header, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for parity.jsonl and parity.md")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: does it all run?")
    parser.add_argument("--target", type=Path, help="folder of the target, for steps of the real size")
    parser.add_argument("--draft", type=Path, help="folder of its drafter")
    parser.add_argument("--train", type=Path, help="the target's answers")
    parser.add_argument("--rows", type=int, default=32, help="answers in a step of the real size")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "parity.jsonl"
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        pair = common.random_pair(Path(temp) / "tiny", **common.TINY)
        for name, part in parts_of(args, {name: Path(path) for name, path in pair.items()}).items():
            started = time.perf_counter()
            try:
                for row in part():
                    append_jsonl(out, row)
                    said = f"{row['error']:.1e}" if "check" in row else f"{row['ms']} ms"
                    print(f"{name}: {row.get('case', '')} {said}", file=sys.stderr, flush=True)
            except Exception as e:  # the next part may well work
                append_jsonl(out, {"broke": name, "why": f"{type(e).__name__}: {e}"[:2000]})
            append_jsonl(out, {"part": name, "seconds": round(time.perf_counter() - started, 1)})
            write_text(args.out / "parity.md", report(read_jsonl(out)))  # now: the next part may be cut off
    append_jsonl(out, {"machine": common.machine(torch.get_num_threads())})
    rows = read_jsonl(out)
    print(report(rows))
    if any("broke" in row for row in rows):
        return 3
    return 0 if all(row.get("ok", True) for row in rows) else 1


def parts_of(args: argparse.Namespace, tiny: Mapping[str, Path]) -> dict[str, Callable[[], Iterator[Row]]]:
    """What runs, by name, in this order."""
    tiny_rows = common.load_rows(tiny["train"], load_model(tiny["draft"]), "train")
    small, real = {"N": 64, "V": 500, "H": 64, "K": 8, "M": 4}, {"N": 96, "V": 49_152, "H": 576, "K": 32, "M": 8}
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "head": lambda: head_checks([small] if args.smoke else [small, real]),
        "prefix": lambda: prefix_checks(tiny["draft"], tiny_rows),
        "masks": lambda: mask_checks(tiny["draft"], tiny_rows),
        "step": lambda: step_checks(tiny, tiny_rows, 16),
    }
    if args.smoke:
        cells = cells_of(64, [512, 1024], [64], [16, 64])
        return parts | {
            "options": lambda: option_checks(tiny, tiny_rows, 16, False, 2),
            "costs": lambda: head_costs(cells, 2),
        }
    folders, rows = tiny, tiny_rows
    if args.draft and args.train:
        folders = {"draft": args.draft}
        rows = common.load_rows(args.train, load_model(args.draft), "train")
    cells = cells_of(4096, [49_152, 151_936], [576, 4096], [256, 1024, 4096])
    return parts | {
        "costs": lambda: head_costs(cells, 3),
        "options": lambda: option_checks(folders, rows, args.rows, True, 10),
    }


if __name__ == "__main__":
    raise SystemExit(main())
