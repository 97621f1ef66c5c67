"""Training a drafter through low-rank adapters (LoRA), also on a 4-bit base (QLoRA), and what becomes of them.

LoRA: Hu et al. 2021 (arXiv 2106.09685), W' = W + alpha / rank · B A. QLoRA: Dettmers et al. 2023 (arXiv 2305.14314).
PEFT puts the adapters on the linear layers and on the input embedding. The head is ours: the loop multiplies hidden
states with `get_output_embeddings().weight`, which on PEFT's layer is the base's matrix alone, so an adapter on the head
would be ignored without a word. Here that attribute *is* W + delta, with gradients, for whoever reads it.

Tied embeddings stay tied: the head then shows the embedding's own pair, the same delta on both sides, so that one matrix is
written and vLLM loads one. Half of a small drafter is that matrix, and untied it would be there twice, to be read at every draft
step. (PEFT's `ensure_weight_tying` makes two parameters over one memory, which AdamW moves twice a step.)

A drafter is written as a plain model: `merged` adds the deltas to the stated base's own 16- or 32-bit weights, never to
4-bit ones (fault D17), and `check_reload` reads the folder back (fault D16).

Shapes: V vocabulary rows, H hidden, r rank, B rows of a batch, L columns, T positions of a text, C of them in a chunk.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.utils import parametrize

from distill import nf4
from pairing.errors import InputError, PartFailedError
from pairing.files import read_json
from pairing.init import HEADER_DTYPES
from pairing.serving import text_config
from pairing.source import load_model
from pairing.weights import EMBEDDINGS, HEADS, TensorInfo, find, read_headers

ADAPTER = "default"
RELOADED = 1e-3  # of the largest logit: how far a reloaded model's logits may be off, its weights being bit-equal
CHUNK = 256  # positions whose logits exist at one time


class LowRankHead(torch.nn.Module):
    """Turns the head's matrix [V, H] into W + scaling · (B A)ᵀ wherever its `weight` is read."""

    def __init__(self, a_rV: torch.nn.Parameter, b_Hr: torch.nn.Parameter, scaling: float) -> None:
        super().__init__()
        self.a_rV, self.b_Hr, self.scaling = a_rV, b_Hr, scaling

    def forward(self, weight_VH: torch.Tensor) -> torch.Tensor:
        return weight_VH + self.delta_VH().to(weight_VH.dtype)

    def delta_VH(self) -> torch.Tensor:
        return self.a_rV.T @ self.b_Hr.T * self.scaling


def load_in_4bit(folder: Path, compute_dtype: str = "float32", dtype: torch.dtype = torch.float32) -> Any:
    """The drafter in `folder` with its blocks' linear layers in NF4 (double quantization), the rest in `dtype`.

    Products are computed in `compute_dtype` (float32, bfloat16, float16). Nothing learns until `attach`. Raises
    InputError where bitsandbytes is missing, the folder is quantized already or does not load.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            "training on a 4-bit base needs bitsandbytes: `pip install 'draftsmith[quant]'`, or train LoRA"
        )
    if "quantization_config" in read_json(folder / "config.json"):
        raise InputError(f"{folder}: quantized already: give the 16- or 32-bit drafter, into which adapters are merged")
    model = nf4.load(folder, dtype, compute_dtype)
    for module in model.modules():
        # On CPUs with AVX512-BF16 the first forward pass without gradients repacks a layer in place for a kernel that
        # computes in bfloat16 and has no backward: after one evaluation, training would lose the gradient through it.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def attach(
    model: Any, rank: int, alpha: float, dropout: float = 0.0, vocabulary: bool = False, seed: int = 0
) -> list[tuple[str, torch.nn.Parameter]]:
    """Puts LoRA on every linear layer of the decoder, in place, freezes all else and returns what learns, by name.

    `vocabulary` adapts embedding and head too. `dropout` is that of the layers' inputs (embedding and head have
    none). The model stays what it was: its decoder, its head's `weight` and its forward pass have the adapters in
    them. They begin as no change at all, and from `seed` alone, so that all ranks begin alike. Raises InputError for a
    rank under 1 and where the model has adapters already.
    """
    if rank < 1:
        raise InputError(f"rank={rank}: LoRA needs a rank of at least 1")
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise InputError("the drafter has adapters already: load it again")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Linear | Conv1D) and module is not head) or (vocabulary and module is embedding)
    ]
    tied = head.weight is embedding.weight
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.simplefilter("ignore")  # of tied embeddings, which are seen to here
        # the wrapper is not needed: it has put the layers into the model itself
        get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names))
        own_b_Hr = torch.randn(head.weight.shape[1], rank)
    if vocabulary:
        adapted = model.get_input_embeddings()
        a_rV, b_Hr = adapted.lora_embedding_A[ADAPTER], adapted.lora_embedding_B[ADAPTER]
        if not tied:
            a_rV = torch.nn.Parameter(torch.zeros(rank, len(head.weight), device=head.weight.device))
            b_Hr = torch.nn.Parameter(own_b_Hr.to(head.weight.device))
        parametrize.register_parametrization(head, "weight", LowRankHead(a_rV, b_Hr, alpha / rank))
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def merged(model: Any, base: Path) -> Any:
    """A plain model: the weights in the folder `base`, in their own 16- or 32-bit type, plus the deltas of `model`.

    `base` is the folder that `model` was loaded from, in 4 bits or not. Each sum is made in float32 and rounded once.
    Raises InputError where `base` is quantized or is visibly another model: other rows, or other values in what is
    frozen and not in 4 bits.
    """
    if "quantization_config" in read_json(base / "config.json"):
        raise InputError(f"{base}: quantized, and a merge into rounded weights loses quality: give the 16-bit drafter")
    stored = find(read_headers(base), EMBEDDINGS)
    plain = load_model(base, dtype=HEADER_DTYPES[stored.dtype] if stored else torch.float32)
    weights = dict(plain.named_parameters())
    _require_same_base(model, weights, base)
    with torch.no_grad():
        for name, delta in _deltas(model).items():
            weight = weights[name]
            weight.copy_(weight.float() + delta.to(weight.device, torch.float32))
    return plain.eval()


def _deltas(model: Any) -> dict[str, torch.Tensor]:
    """Weight's name in the plain model -> delta. A tied head has none of its own: its weight is the embedding's."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    deltas = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            deltas[f"{name}.weight"] = module.get_delta_weight(ADAPTER)
        elif module is head and parametrize.is_parametrized(head, "weight"):
            own = head.parametrizations.weight
            if own.original is not embedding.base_layer.weight:
                deltas[f"{name}.weight"] = own[0].delta_VH()
    return deltas


def _require_same_base(model: Any, weights: dict[str, torch.Tensor], base: Path) -> None:
    for name, frozen in model.named_parameters():
        if ".lora_" in name or name.endswith(("a_rV", "b_Hr")):
            continue
        weight = weights.get(name.replace(".base_layer.", ".").replace(".parametrizations.weight.original", ".weight"))
        if weight is None or (frozen.dtype.is_floating_point and frozen.shape != weight.shape):
            sizes = f" ({list(frozen.shape)} against {list(weight.shape)})" if weight is not None else ""
            raise InputError(f"{base}: not the base that was trained on: {name} differs in shape{sizes}")
        if frozen.dtype.is_floating_point and not torch.equal(frozen.cpu(), weight.to(frozen.dtype)):
            raise InputError(f"{base}: not the base that was trained on: {name} has other values")


def check_reload(folder: Path, model: Any, tolerance: float = RELOADED) -> dict[str, float]:
    """Reads the model in `folder` back and holds it against `model`, from which it was written (fault D16).

    Tied flag and rows must be true to the weights in the files, every weight must be `model`'s bit by bit, and the
    logits on fixed ids within `tolerance` of the largest. Gives {"largest_logit_difference", "tolerance"}, both as
    shares of the largest logit. Raises PartFailedError naming what differs.
    """
    again = load_model(folder, dtype=model.dtype).to(model.device).eval()
    tensors, rows = read_headers(folder), text_config(read_json(folder / "config.json"))["vocab_size"]
    first, last = (next((n for n in tensors if n.endswith(ends)), None) for ends in (EMBEDDINGS, HEADS))
    tied = bool(again.config.tie_word_embeddings)
    if tied != (model.get_input_embeddings().weight is model.get_output_embeddings().weight):
        raise PartFailedError(f"{folder}: tie_word_embeddings is {tied}, which the model is not; not to be used")
    if not tied and last is None:
        raise PartFailedError(f"{folder}: tie_word_embeddings is False and no head is there; not to be used")
    if tied and first and last and not torch.equal(*(_stored(tensors, name) for name in (first, last))):
        raise PartFailedError(f"{folder}: tie_word_embeddings is True and {last} differs from {first}; not to be used")
    for name in (first, last):
        if name and tensors[name].shape[0] != rows:
            raise PartFailedError(
                f"{folder}: {name} has {tensors[name].shape[0]} rows, config.json says {rows}; not to be used"
            )
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    if odd := sorted(set(ours) ^ set(theirs)):
        raise PartFailedError(f"{folder}: {odd[0]} is only {'lost' if odd[0] in ours else 'there'} after reload")
    for name, weight in ours.items():
        if not torch.equal(weight, theirs[name]):
            raise PartFailedError(f"{folder}: {name} is another one after reload; not to be used")
    ids_BL = torch.randint(rows, (4, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    was_training = model.training
    with torch.no_grad():
        a, b = (m(input_ids=ids_BL).logits.float() for m in (model.eval(), again))
    model.train(was_training)
    gap = float((a - b).abs().max() / a.abs().max())
    if not gap <= tolerance:
        raise PartFailedError(
            f"{folder}: logits differ by {gap:.2g} of the largest after reload, {tolerance:g} allowed"
        )
    return {"largest_logit_difference": gap, "tolerance": tolerance}


def _stored(tensors: dict[str, TensorInfo], name: str) -> torch.Tensor:
    with safe_open(tensors[name].file, framework="pt") as f:
        return f.get_tensor(name)


def drift(before: Any, after: Any, texts: Sequence[Sequence[int]], real: int | None = None) -> dict[str, float]:
    """How far `after` (merged in 16 bit) is from `before` (as trained, on 4 bits) on these texts (fault D17).

    Gives "kl" (mean KL(before || after) in nats per position), "top1" (share of positions with the same argmax) and
    "positions". Rows from `real` on are padding and get no probability. Logits exist for 256 positions at a time.
    Raises InputError where no text has a token.
    """
    kl, same, positions = 0.0, 0, sum(map(len, texts))
    if not positions:
        raise InputError("no text to measure the drift of the merge on")
    modes = before.training, after.training
    before.eval(), after.eval()
    with torch.no_grad():
        heads_VH = [m.get_output_embeddings().weight[:real].float() for m in (before, after)]
        for text in (t for t in texts if len(t)):
            ids_1T = torch.tensor([list(text)])
            hidden_TH = [m.get_decoder()(input_ids=ids_1T.to(m.device)).last_hidden_state[0] for m in (before, after)]
            for i in range(0, len(text), CHUNK):
                p_CV, q_CV = (
                    (h[i : i + CHUNK].float() @ w.T).log_softmax(-1).cpu()
                    for h, w in zip(hidden_TH, heads_VH, strict=True)
                )
                kl += float((p_CV.exp() * (p_CV - q_CV)).sum(dtype=torch.float64))
                same += int((p_CV.argmax(-1) == q_CV.argmax(-1)).sum())
    before.train(modes[0]), after.train(modes[1])
    return {"kl": kl / positions, "top1": same / positions, "positions": positions}
