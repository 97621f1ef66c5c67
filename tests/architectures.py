"""Tiny random models of every architecture that `init` cuts, one shape for all, and parts of them that compute nothing."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests import tiny

CLASSES = {  # name: class, its config, and the keys of `shape` that it does not have or calls otherwise
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"head_dim": ...}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"head_dim": ..., "num_key_value_heads": ...}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"head_dim": ..., "num_key_value_heads": ..., "intermediate_size": ...}),
}
COUPLED = ("qwen2", "neox", "opt")  # a head is hidden / heads wide: heads cannot go alone


def shape(layers: int = 2, heads: int = 8, kv_heads: int = 4, head_dim: int = 16, hidden: int = 128) -> dict[str, Any]:
    """FFN 192 in all."""
    return {
        "vocab_size": tiny.ROWS,
        "hidden_size": hidden,
        "intermediate_size": 192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "initializer_range": 0.2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def model(kind: str, seed: int = 0, dead: bool = False, **sizes: int) -> Any:
    """`sizes` as of `shape`. `dead`: see `kill`."""
    torch.manual_seed(seed)
    name, config, own = CLASSES[kind]
    values = shape(**sizes)
    keys = {k: v for k, v in (values | own).items() if v is not ...}
    if kind == "opt":
        keys |= {"ffn_dim": values["intermediate_size"], "word_embed_proj_dim": values["hidden_size"]}
    made = getattr(transformers, name)(getattr(transformers, config)(**keys)).float().eval()
    if kind == "gemma3":  # which multiplies its embedding by sqrt(hidden), and being tied would say its input again
        with torch.no_grad():
            made.get_input_embeddings().weight *= 0.1
    if dead:
        kill(made, values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"])
    return made


@torch.no_grad()
def kill(made: Any, heads: int, kv_heads: int, head_dim: int) -> None:
    """In every layer the FFN channels from 128 on put out nothing, and the second half of the heads neither: their values
    are 0."""
    for name, weight in made.named_parameters():
        if name.endswith(("up_proj.weight", "fc1.weight", "fc1.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias")):
            weight[-64:] = 0
            if "gate_up" in name:
                weight[128:192] = 0
        elif "qkv_proj" in name:
            weight[-kv_heads * head_dim // 2 :] = 0
        elif name.endswith(("v_proj.weight", "v_proj.bias")):
            weight[len(weight) // 2 :] = 0
        elif "query_key_value" in name:
            for head in range(heads // 2, heads):
                weight[(head * 3 + 2) * head_dim : (head + 1) * 3 * head_dim] = 0
