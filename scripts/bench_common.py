"""What the benches share: children in processes of their own, results that survive a kill, and our engine's one call."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from distill.answers import Answer, begin, complete, open_answers, write_shard
from distill.batches import Batch, Rows, check_rows, collate, windows
from distill.evaluate import replay_prompts, score_prompts
from distill.fake_quantize import Quantizer
from distill.prompts import prompt
from distill.signals import online
from distill.train import Settings, fit
from pairing.acceptance import Replay, acceptance_length_of
from pairing.bootstrap import interval
from pairing.errors import InputError
from pairing.files import append_jsonl, new_folder, read_json, read_jsonl, write_json
from pairing.init import init_drafter
from pairing.pair import describe_model
from pairing.progress import bar
from pairing.source import load_model, resolve
from pairing.vllm_plugin import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
K = 4  # num_speculative_tokens for which τ is given
WARMUP, BETA2, CLIP = 0.04, 0.98, 1.0  # of every contender's optimizer and schedule
WIDE = {"rows": 151_936, "hidden": 576, "layers": 2, "prompts": 96, "prompt_tokens": 32, "answer_tokens": 32}
TINY = {"rows": 512, "hidden": 64, "layers": 3, "prompts": 64, "prompt_tokens": 24, "answer_tokens": 16}
TINY_WIDE = TINY | {"rows": 8192}
MATMUL_PRECISIONS = ("highest", "high", "medium")
Row = dict[str, Any]
Statistic = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


# ---- our engine: the one place that knows how distill is called ----


def load_rows(folder: Path, model: Any, name: str) -> Rows:
    """The answers in `folder`, checked against the model that is to learn or be judged on them."""
    config = model.config
    return check_rows(
        open_answers(folder),
        name,
        rows=config.vocab_size,
        real=config.vocab_size,
        context=config.max_position_embeddings,
    )


def train(
    model: Any,
    rows: Rows,
    *,
    losses: dict[str, float],
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    trainable: Any,
    target: Any = None,
    top_logprobs: int | None = None,
    accelerator: Accelerator | None = None,
    quantizer: Quantizer | None = None,
) -> list[Row]:
    """Trains `model` in place and returns the loop's own line for each step.

    `target`: the model, for the online signal; without it the record's first `top_logprobs` tokens a position are used.
    `quantizer` is in every step's forward pass.
    """
    accelerator = accelerator or Accelerator()
    settings = Settings(
        seed=seed, batch_size=batch_size, accumulation=1, lr=lr, warmup=WARMUP, weight_decay=0.0, beta2=BETA2, clip=CLIP,
        trainable=trainable, losses=losses, chunk=None, epochs=None, max_steps=steps, minutes=None,
        eval_every=steps + 1, eval_prompts=1, checkpoint_every=steps + 1, keep=1, top_logprobs=top_logprobs,
        quantizer=quantizer, quantizer_from=0.0,
    )  # fmt: skip
    device = accelerator.device
    signal = None if target is None else online(target, "the target", device, device)
    with tempfile.TemporaryDirectory() as out:
        fit(accelerator, model, rows, {}, settings, Path(out), target=signal)
        return [row for row in read_jsonl(Path(out) / "metrics.jsonl") if row["kind"] == "train"]


def batches(rows: Rows, *, steps: int, batch_size: int, seed: int) -> list[Batch]:
    """What `train` sees, step by step: the same rows in the same order for every contender."""
    order: list[Any] = []
    epoch = 0
    while len(order) < steps:
        order += windows(rows, seed, epoch, batch_size)
        epoch += 1
    return [collate(rows, window) for window in order[:steps]]


def sequences(batch: Batch) -> list[tuple[list[int], int]]:
    """Each row's whole token ids, up to its last supervised one, and the number of those before its first supervised one."""
    result = []
    for b in range(len(batch.input_BL)):
        at = batch.row_N == b
        columns, answer = batch.column_N[at], batch.signal.answer_N[at]
        if int(columns[-1] - columns[0]) + 1 != len(columns):
            raise InputError(
                f"prompt {batch.ids[b]} has several answers: take answers to prompts of one turn, as TRL knows one"
            )
        ids = [*batch.input_BL[b, : int(columns[-1]) + 1].tolist(), int(answer[-1])]
        result.append((ids, int(columns[0]) + 1))
    return result


def scored(model: Any, rows: Rows, accelerator: Accelerator | None = None) -> list[Row]:
    """The held-out prompts as `distill` scores them, as plain rows."""
    found = score_prompts(accelerator or Accelerator(), model, rows, batch_size=8)
    return [vars(s) for s in found]


# ---- pairs that need no download ----


def random_pair(
    folder: Path, *, rows: int, hidden: int, layers: int, prompts: int, prompt_tokens: int, answer_tokens: int
) -> Row:
    """A random Llama of these sizes, a drafter of its first and last layer, and its own answers to random prompts; made once."""
    paths = {name: folder / name for name in ("target", "draft", "train", "heldout")}
    if not (folder / "whole").exists():
        with new_folder(folder) as temp:
            _make_pair(temp, rows, hidden, layers, prompts, prompt_tokens, answer_tokens)
            write_json(temp / "whole", {"rows": rows, "hidden": hidden, "layers": layers})
    return {name: str(path) for name, path in paths.items()}


def _make_pair(
    folder: Path, rows: int, hidden: int, layers: int, prompts: int, prompt_tokens: int, answer_tokens: int
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=hidden // 64 or 1, num_key_value_heads=1, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(rows)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' t2 ' }}{% endfor %}"
    tokenizer.save_pretrained(folder / "target")
    source = resolve(str(folder / "target"))
    init_drafter(source, folder / "draft", sorted({0, layers - 1}))
    target, generator = load_model(folder / "target").eval(), torch.Generator().manual_seed(0)
    for name, count in (("train", prompts), ("heldout", max(8, prompts // 6))):
        begin(folder / name, {"target": describe_model(source), "rows": rows, "top_logprobs": 32})
        for start in range(0, count, 8):
            ids_BP = torch.randint(3, rows, (8, prompt_tokens), generator=generator)
            write_shard(folder / name, _answered(target, ids_BP, answer_tokens, f"{name} {start}"))
        complete(folder / name, {})


def _answered(target: Any, prompts_BP: torch.Tensor, tokens: int, name: str) -> list[Answer]:
    """Answers of exactly `tokens` tokens, drawn at temperature 1."""
    P = prompts_BP.shape[1]
    with torch.inference_mode():
        ids_BL = target.generate(
            prompts_BP, attention_mask=torch.ones_like(prompts_BP), do_sample=True, top_k=0, max_new_tokens=tokens,
            min_new_tokens=tokens,
        )  # fmt: skip
        top = target(ids_BL).logits[:, P - 1 : -1].log_softmax(-1).topk(32)
    found = []
    for b, ids in enumerate(ids_BL.tolist()):
        chat = prompt([{"role": "user", "content": f"{name} {b}"}])
        found.append(
            Answer(chat, ids, [(P, P + tokens)], "length", top.indices[b].int().numpy(), top.values[b].numpy())
        )
    return found


# ---- figures over prompts, with intervals ----


def tau(scores: Sequence[Row]) -> float:
    return _replay(scores).acceptance_length


def _replay(scores: Sequence[Row]) -> Replay:
    return replay_prompts([s["accepted"] for s in scores], K)


def means(scores: Sequence[Row]) -> dict[str, float]:
    """Token means of top-1 agreement and of α's bracket, and τ at K."""
    tokens = sum(s["tokens"] for s in scores)
    return {k: sum(s[k] for s in scores) / tokens for k in ("top1", "alpha_low", "alpha_high")} | {"tau": tau(scores)}


def difference(figure: str, arm: Sequence[Sequence[Row]], other: Sequence[Sequence[Row]]) -> tuple[float, float, float]:
    """`arm` less `other` in a figure of `means`, with its 95 % interval: both averaged over their seeds, prompts paired.

    The interval says how much the held-out prompts leave open, not the seeds: their spread is given beside it.
    """
    ids = [s["id"] for s in arm[0]]
    assert all([s["id"] for s in seed] == ids for seed in (*arm, *other)), "arms must be scored on the same prompts"
    ours, theirs = _statistic(figure, arm), _statistic(figure, other)
    ones = np.ones((1, len(ids)))
    low, high = interval(lambda w: ours(w) - theirs(w), len(ids))
    return float(ours(ones)[0] - theirs(ones)[0]), low, high


def _statistic(figure: str, seeds: Sequence[Sequence[Row]]) -> Statistic:
    if figure == "tau":
        replays = [_replay(scores) for scores in seeds]
        return lambda w: np.mean([acceptance_length_of(r, w) for r in replays], axis=0)
    sums_P = np.mean([[s[figure] for s in scores] for scores in seeds], axis=0)
    tokens_P = np.array([s["tokens"] for s in seeds[0]], dtype=np.float64)
    return lambda w: (w @ sums_P) / (w @ tokens_P)


# ---- children and results ----


def start(
    name: str,
    argv: Sequence[str],
    made: argparse.ArgumentParser,
    child: Callable[[Row], Row],
    run: Callable[[Any], list[Row]],
    report: Callable[[list[Row]], str],
) -> int:
    """A bench's command line: a child does its one task, the parent runs all and reports. Returns the exit code."""
    if argv[:1] == ["--child"]:
        task = json.loads(argv[1])
        write_json(Path(task["result"]), child(task))
        return 0
    args = made.parse_args(argv)
    try:
        results = run(args)
    except InputError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 2
    print(report(results))
    return 3 if any("error" in row for row in results) else 0


def run_children(
    module: str,
    specs: Sequence[Row],
    out: Path,
    *,
    jobs: int = 1,
    threads: int,
    python: Callable[[Row], str] = lambda _: sys.executable,
    limit_s: float = 3600,
) -> list[Row]:
    """Runs `python -m module --child SPEC` for each spec that has no result in `out` yet, `jobs` at a time, in order.

    Returns the results of all specs in their order. A result is one line of `out`: the spec and what the child found, or
    `error` with the last line that it said; errors are tried again by the next start.
    """
    have = {key(row): row for row in read_jsonl(out) if "error" not in row}
    todo = [spec for spec in specs if key(spec) not in have]
    lock = threading.Lock()

    def one(spec: Row) -> None:
        result = spec | _child(module, spec, python(spec), threads, limit_s)
        with lock:
            append_jsonl(out, result)
            have[key(spec)] = result
            said = result.get("error") or result.get("said", "")
            print(f"{name_of(spec)}: {said}", file=sys.stderr, flush=True)
            advance(1, name_of(spec))

    with (
        bar(module.rsplit(".", 1)[-1], len(specs), len(specs) - len(todo)) as advance,
        ThreadPoolExecutor(jobs) as pool,
    ):
        list(pool.map(one, todo))
    return [have[key(spec)] for spec in specs]


def key(row: Row) -> str:
    """What makes a run the same run: its spec. A result repeats it under the same names."""
    return json.dumps({k: row[k] for k in sorted(row["spec"])}, sort_keys=True)


def spec(**fields: Any) -> Row:
    """A child's task. `spec` names the fields that tell it from others."""
    return {**fields, "spec": sorted(fields)}


def name_of(row: Row) -> str:
    return " · ".join(str(row[k]) for k in ("case", "contender", "arm", "seed", "repeat") if k in row)


def _child(module: str, task: Row, python: str, threads: int, limit_s: float) -> Row:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
           "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": paths}  # fmt: skip
    with tempfile.TemporaryDirectory() as temp:
        result, log = Path(temp) / "result.json", Path(temp) / "log"
        command = [python, "-m", module, "--child", json.dumps(task | {"result": str(result), "threads": threads})]
        try:
            with open(log, "wb") as said:
                done = subprocess.run(
                    command, cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                    timeout=limit_s, preexec_fn=die_with_parent,
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit_s:.0f} s"}
        if done.returncode == 0 and result.is_file():
            return dict(read_json(result))
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"error": f"exit {done.returncode}: {lines[-1] if lines else 'killed without a word'}"}


def settle(task: Row) -> None:
    """What a child sets before it does anything."""
    torch.set_num_threads(task["threads"])
    torch.set_float32_matmul_precision(task["matmul_precision"])


def machine(threads: int) -> Row:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu(), "threads": threads, "gpu": gpu, "python": platform.python_version()} | {
        p: _version(p) for p in ("torch", "transformers", "accelerate", "trl")
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parser(about: str) -> argparse.ArgumentParser:
    """The options that both benches have."""
    made = argparse.ArgumentParser(description=about, allow_abbrev=False)
    made.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub id, folder or .gguf file")
    made.add_argument("--draft", type=Path, help="the untrained drafter, from `draftsmith init`")
    made.add_argument("--train", type=Path, help="the target's answers to train on, from `draftsmith generate`")
    made.add_argument("--heldout", type=Path, help="its answers to other prompts")
    made.add_argument(
        "--out", type=Path, required=True, help="JSON Lines, a line per run; runs that it holds are not done again"
    )
    made.add_argument("--threads", type=int, default=0, help="threads per run; 0 shares out the cores")
    made.add_argument("--matmul-precision", choices=MATMUL_PRECISIONS, default="highest",
                      help="of float32 products, as distill's matmul_precision; for every contender")  # fmt: skip
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--trainable", choices=["layers", "all"], default="layers",
                      help="layers: embedding and head frozen, as draftsmith does; all: everything learns")  # fmt: skip
    return made


def require(args: argparse.Namespace, *names: str) -> None:
    """Raises InputError naming the options that are missing."""
    if missing := [f"--{name}" for name in names if getattr(args, name) is None]:
        raise InputError(f"{', '.join(missing)}: missing; make them with `draftsmith init` and `draftsmith generate`")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are set to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
