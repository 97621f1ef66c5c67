"""Speculator heads for the tiny target of tests/tiny.py: random EAGLE, EAGLE-3 and Medusa checkpoints as vLLM reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 1, 32  # as tests.tiny.model


def eagle(folder: Path, target: Path, *, third: bool) -> Path:
    """One decoder layer on the target's hidden states: of its last layer (EAGLE), or of three layers (EAGLE-3)."""
    config = json.loads((target / "config.json").read_text())
    rows, first = config["vocab_size"], "midlayer" if third else "layers.0"
    width = 2 * H if third else H
    shapes = {
        "fc.weight": (H, 3 * H if third else 2 * H),
        f"{first}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{first}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{first}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{first}.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
        f"{first}.mlp.gate_proj.weight": (FFN, H),
        f"{first}.mlp.up_proj.weight": (FFN, H),
        f"{first}.mlp.down_proj.weight": (H, FFN),
        f"{first}.post_attention_layernorm.weight": (H,),
    }
    if third:
        shapes |= {"norm.weight": (H,), "lm_head.weight": (rows, H)}
        shapes |= {f"{first}.input_layernorm.weight": (H,), f"{first}.hidden_norm.weight": (H,)}
        own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": rows}
        own["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    else:
        own = {"architectures": ["EagleLlamaForCausalLM"]}
    own |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return _write(folder, {**config, **own}, shapes)


def medusa(folder: Path, target: Path, heads: int) -> Path:
    """A residual block and an output layer for each drafted position."""
    rows = json.loads((target / "config.json").read_text())["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {f"blocks.{i}.layers.0.weight": (H, H) for i in range(heads)}
    shapes |= {f"lm_heads.{i}.weight": (rows, H) for i in range(heads)}
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": rows}
    return _write(folder, {**config, "num_heads": heads, "num_hidden_layers": 1}, shapes)


def _write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    drawn = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.2 * torch.randn(shape, generator=drawn)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
