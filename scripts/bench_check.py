"""How long `draftsmith check` takes on a large vocabulary; the goal is under 5 s for 150,000 tokens.

python scripts/bench_check.py [TOKENS]
"""

from __future__ import annotations

import itertools
import json
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


def once(pair: list[Path]) -> tuple[float, float]:
    """Wall and processor seconds of the whole command in a new process: imports, both models, the report."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = ["-m", "recipes.check", *map(str, pair), "preflight=skip", "--json"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["aligned"]
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(tokens: int, times: int = 5) -> int:
    """The goal is held against processor seconds: they are the wall's on a machine that does nothing else."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as temp:
        target, same, other = (folder(Path(temp) / name, tokens) for name in ("target", "same", "other"))
        edited = other / "tokenizer_config.json"
        write_json(edited, read_json(edited) | {"model_max_length": 4096})  # the same tokens in files that differ
        for name, drafter in (("equal tokenizer files", same), ("other files", other)):
            walls, cpus = zip(*(once([target, drafter]) for _ in range(times)), strict=True)
            worst = max(worst, median(cpus))
            print(
                f"{tokens} tokens, {name}: {median(cpus):.2f} s of processor time ({min(cpus):.2f} to {max(cpus):.2f}), "
                f"{median(walls):.2f} s by the clock ({min(walls):.2f} to {max(walls):.2f}), {times} runs"
            )
    print(f"{worst / GOAL_S:.2f} of the goal of {GOAL_S:.0f} s")
    return 0 if worst < GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 150_000))
