"""How long `draftsmith check` takes on a large vocabulary; the goal is under 5 s for 150,000 tokens, whatever the pair.

python -m scripts.bench_check [TOKENS]
"""

from __future__ import annotations

import itertools
import os
import resource
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pairing.files import read_json, write_json
from pairing.rows import byte_level_alphabet

ROOT = Path(__file__).resolve().parents[1]
GOAL_S = 5.0


def vocabulary(tokens: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, then words of two, three and four letters, each a merge of two tokens before it."""
    letters = string.ascii_lowercase + "ĠABCDEFGHIJ"
    pairs = [a + b for a, b in itertools.product(letters, repeat=2)]
    merges = [(p[0], p[1]) for p in pairs]
    merges += [(p, c) for p in pairs for c in letters]
    merges += [(a, b) for a in pairs for b in pairs]
    order = dict.fromkeys([*byte_level_alphabet()])
    kept = []
    for a, b in merges:
        if len(order) == tokens:
            break
        if a + b not in order:
            order[a + b] = None
            kept.append((a, b))
    return {token: i for i, token in enumerate(order)}, kept


def folder(path: Path, tokens: int) -> Path:
    vocab, merges = vocabulary(tokens)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="!").save_pretrained(path)
    config = {"model_type": "llama", "vocab_size": tokens, "hidden_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 1, "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip
    write_json(path / "config.json", config)
    save_file({"model.embed_tokens.weight": torch.zeros(tokens, 8)}, path / "model.safetensors")
    return path


def once(words: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of a new Python process. `check` ends with 1 where a pair is not aligned."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(done.stderr)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(tokens: int, times: int = 5) -> int:
    """The whole command in a new process, and beside it, in turns, what only importing transformers' tokenizers takes.

    The goal is for the whole command, in processor seconds, which are the clock's on a machine that does nothing else.
    """
    with tempfile.TemporaryDirectory() as temp:
        names = ("target", "same", "files", "merges")
        target, same, files, merges = (folder(Path(temp) / name, tokens) for name in names)
        edited = files / "tokenizer_config.json"
        write_json(edited, read_json(edited) | {"model_max_length": 4096})  # the same tokens in files that differ
        cut = read_json(merges / "tokenizer.json")
        cut["model"]["merges"].pop()  # the same tokens, one of which no text is cut into
        write_json(merges / "tokenizer.json", cut)
        check = ["-m", "recipes.check", str(target)]
        imports = "import recipes.check, transformers; transformers.AutoTokenizer"
        goals = {
            "equal tokenizer files": [*check, str(same), "preflight=skip"],
            "other tokenizer files": [*check, str(files), "preflight=skip"],
            "other merges": [*check, str(merges), "preflight=skip"],
            "other merges, as it comes (with pre-flight)": [*check, str(merges)],
        }
        cases = goals | {"only imports, with torch": ["-c", imports]}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(times):
            for name, words in cases.items():
                taken[name].append(once(words))
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(
        f"load {load:.1f} on {cores} cores (1 is this bench); processor time grows with other work too, by the caches"
    )
    for name, runs in taken.items():
        walls, cpus = zip(*runs, strict=True)
        print(
            f"{tokens} tokens, {name}: {median(cpus):.2f} s of processor time ({min(cpus):.2f} to {max(cpus):.2f}), "
            f"{median(walls):.2f} s by the clock ({min(walls):.2f} to {max(walls):.2f}), {times} runs"
        )
    worst = max(median(cpu for _, cpu in taken[name]) for name in goals)
    print(f"the slowest takes {worst:.2f} s; the goal of {GOAL_S:.0f} s is {'met' if worst < GOAL_S else 'NOT met'}")
    return 0 if worst < GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 150_000))
