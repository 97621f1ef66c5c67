"""How long `draftsmith check` takes on a large vocabulary; the goal is under 5 s for 150,000 tokens.

python scripts/bench_check.py [TOKENS]
"""

from __future__ import annotations

import itertools
import string
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pairing.alignment import check_pair
from pairing.files import write_json
from pairing.rows import byte_level_alphabet
from pairing.source import resolve

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


def main(tokens: int) -> int:
    with tempfile.TemporaryDirectory() as temp:
        pair = [resolve(str(folder(Path(temp) / name, tokens))) for name in ("target", "drafter")]
        started = time.perf_counter()
        report = check_pair(*pair)
        seconds = time.perf_counter() - started
    print(f"{tokens} tokens: {seconds:.2f} s ({report['verdict']}); goal {GOAL_S:.0f} s")
    return 0 if report["aligned"] and seconds < GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 150_000))
