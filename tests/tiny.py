"""Small real models for tests: a byte-level tokenizer built by hand, and random Llama weights that vLLM loads too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
REAL_TOKENS = 259  # 3 special and 256 bytes
ROWS = 272  # padded to a multiple of 16, as real models pad theirs


def tokenizer(swap: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """259 tokens: three special ones, then a token per byte. `swap` exchanges two ids (fault D2)."""
    order = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if swap:
        a, b = swap
        order[a], order[b] = order[b], order[a]
    raw = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(order)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    return fast


def model(
    layers: int = 2, rows: int = ROWS, seed: int = 0, tied: bool = True, positions: int = 512, **kwargs: Any
) -> LlamaForCausalLM:
    """hidden 64, 2 heads of 32: the smallest that vLLM's CPU attention takes; all widths fill NF4's blocks of 64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # wide enough that greedy answers vary with the prompt
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **kwargs,
    )
    return LlamaForCausalLM(config).float().eval()


def folder(path: Path, swap: tuple[int, int] | None = None, **kwargs: Any) -> Path:
    """Writes model and tokenizer to `path` as a Hugging Face folder and returns it. kwargs as for `model`."""
    model(**kwargs).save_pretrained(path)
    tokenizer(swap).save_pretrained(path)
    return path


def says(q: dict[int, float]) -> LlamaForCausalLM:
    """A model whose next token is drawn from `q` whatever came before: all hidden states are ones, the head's rows log q."""
    one = model(layers=1, tied=False)
    with torch.no_grad():
        for p in one.model.parameters():
            p.zero_()
        one.model.embed_tokens.weight.fill_(1.0)
        one.model.norm.weight.fill_(1.0)
    say(one, q)
    return one


@torch.no_grad()
def say(one: LlamaForCausalLM, q: dict[int, float]) -> None:
    """Makes `q` what a model of `says` draws from."""
    head_VH = one.lm_head.weight
    head_VH.fill_(-1.0)  # e^-64 of the mass
    for id_, share in q.items():
        head_VH[id_] = math.log(share) / head_VH.shape[1]
