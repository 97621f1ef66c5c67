"""A drafter from the target itself: some of its layers, its embedding, norm and head, its tokenizer and template.

Works on the safetensors files: tensors are copied by name and renumbered; memory holds the drafter, never the target.
"""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pairing.card import write_card
from pairing.engine import draftable, layer_kinds
from pairing.errors import InputError
from pairing.files import new_folder, read_json, write_json
from pairing.pair import new_pair
from pairing.progress import bar
from pairing.serving import text_config
from pairing.sound import require_config
from pairing.source import TOKENIZER_FILES, ModelSource
from pairing.weights import EMBEDDINGS, TensorInfo, parameters, read_headers
from pairing.width import Kept, Shape, narrow, narrow_config, narrow_shape, narrower, shape_of, shapes_below

# Where each architecture keeps its layers. In none of them a layer needs to know its number.
ARCHITECTURES = {
    "LlamaForCausalLM": "model.",
    "MistralForCausalLM": "model.",
    "Qwen2ForCausalLM": "model.",
    "Qwen3ForCausalLM": "model.",
    "Gemma3ForCausalLM": "model.",
    "Phi3ForCausalLM": "model.",
    "GPTNeoXForCausalLM": "gpt_neox.",
    "OPTForCausalLM": "model.decoder.",
}
LAYER = re.compile(r"((?:model\.|gpt_neox\.|model\.decoder\.)layers\.)(\d+)\.(.+)")
WHOLE = re.compile(r"(embed_tokens|embed_in|embed_positions|norm|final_layer_norm)\.(weight|bias)")
HEAD_NAMES = ("lm_head.weight", "embed_out.weight")
LAYERWISE = ("layer_types",)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# buffers that old files carry; today's classes compute them
SKIPPED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADER_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def spaced(count: int, of: int) -> list[int]:
    """`count` layers of `of`, evenly spaced, the first and the last among them."""
    if not 2 <= count <= of:
        raise InputError(f"count={count}: the target has {of} layers: give 2 to {of}, or name them with layers=[…]")
    return [round(i * (of - 1) / (count - 1)) for i in range(count)]


@dataclass(frozen=True)
class Width:
    """A narrower shape, and where it is to be written what it keeps."""

    shape: Shape
    kept: Kept | None = None


def plan_init(
    target: ModelSource, layers: list[int], dtype: str | None = None, width: Width | None = None
) -> dict[str, Any]:
    """What `init_drafter` would do: {"layers", "of", "width", "dtype", "parameters", "bytes", "config", "tensors"}.

    "tensors" maps each new name to the target's name. Everything that can be wrong is found here, from headers and
    config: an unknown architecture, layers out of range, a drafter that vLLM would not run (`draftable`), a tied flag
    that the weights contradict. Raises InputError.
    """
    config = read_json(target.path / "config.json")
    tensors = read_headers(target.path)
    _require_known(target.name, config, tensors)
    of = int(config["num_hidden_layers"])
    _require_layers(layers, of)
    try:
        cut = _cut_config(config, layers, of)
    except ValueError as e:
        raise InputError(f"{target.name}: {e}") from e
    if reasons := draftable(cut):
        kinds = layer_kinds(config)
        by_kind = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in sorted(set(kinds))}
        choose = "".join(f"; {kind}: {numbers}" for kind, numbers in by_kind.items() if len(by_kind) > 1)
        raise InputError(f"{target.name}, layers {layers}: no drafter for vLLM: {'; '.join(reasons)}{choose}")
    _require_head(target, config, tensors)
    names: dict[str, str] = {}
    for name in tensors:
        match = LAYER.fullmatch(name)
        if name.endswith(SKIPPED):
            continue
        if match is None:
            names[name] = name
        elif int(match[2]) in layers:
            names[f"{match[1]}{layers.index(int(match[2]))}.{match[3]}"] = name
    if cut.get("tie_word_embeddings"):
        for head in HEAD_NAMES:
            names.pop(head, None)
    kept = [tensors[old] for old in names.values()]
    if dtype is not None:
        cut["dtype"] = dtype
        cut.pop("torch_dtype", None)
    stored = sorted({t.dtype for t in kept})
    if width is not None:
        cut = narrow_config(cut, config["architectures"][0], width.shape)
    shapes = [
        narrow_shape(name, tensors[name].shape, width.shape) if width else tensors[name].shape
        for name in names.values()
    ]
    values = [math.prod(shape) for shape in shapes]
    sizes = [DTYPES[dtype].itemsize if dtype else HEADER_DTYPES[t.dtype].itemsize for t in kept]
    return {
        "layers": layers,
        "of": of,
        "width": asdict(width.shape) if width else None,
        "dtype": dtype or "+".join(str(HEADER_DTYPES[d]).removeprefix("torch.") for d in stored),
        "parameters": sum(values),
        "bytes": sum(n * size for n, size in zip(values, sizes, strict=True)),
        "config": cut,
        "tensors": names,
    }


def init_drafter(
    target: ModelSource,
    out: Path,
    layers: list[int],
    dtype: str | None = None,
    width: Width | None = None,
    chosen_by: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the drafter folder `out` (atomically; never over another one) and returns its plan's figures.

    `layers` are ascending numbers of the target's layers; `dtype` (float32, bfloat16, float16) casts, None keeps.
    `width` needs its `kept`. `chosen_by` goes into pair.json: on what text layers and channels were chosen.
    Raises InputError as `plan_init` does, or where `out` holds something.
    """
    plan = plan_init(target, layers, dtype, width)
    headers = read_headers(target.path)
    old_shape = shape_of(read_json(target.path / "config.json")) if width else None
    assert width is None or width.kept is not None
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for new, old in plan["tensors"].items():
        by_file.setdefault(headers[old].file, []).append((new, old))
    with new_folder(out) as temp:
        weights: dict[str, torch.Tensor] = {}
        with bar("copying layers", total=len(plan["tensors"])) as advance:
            for file, pairs in by_file.items():
                with safe_open(file, framework="pt") as source:
                    for new, old in pairs:
                        tensor = source.get_tensor(old)
                        if width is not None and width.kept is not None and old_shape is not None:
                            number = LAYER.fullmatch(old)
                            tensor = narrow(tensor, old, int(number[2]) if number else None, width.kept, old_shape)
                        weights[new] = tensor.to(DTYPES[dtype]) if dtype else tensor
                        advance(1, "")
        save_file(weights, temp / "model.safetensors", metadata={"format": "pt"})
        write_json(temp / "config.json", plan["config"])
        copy_companions(target.path, temp)
        if not (temp / "generation_config.json").is_file():
            ids = {k: v for k, v in plan["config"].items() if k in SPECIAL}
            write_json(temp / "generation_config.json", ids)
        made = {"step": "init", "target": target.name} | {
            k: plan[k] for k in ("layers", "of", "width", "dtype", "parameters")
        }
        made |= chosen_by or {}
        write_json(temp / "pair.json", new_pair(target, made))
        write_card(temp, name=out.name)
    return {"drafter": str(out), "target": target.name} | {
        k: v for k, v in plan.items() if k not in ("config", "tensors")
    }


def init_from_config(target: ModelSource, out: Path, config: dict[str, Any], seed: int, dtype: str) -> dict[str, Any]:
    """A drafter of `config` (a config.json) with random weights, the target's rows, tokenizer and special ids.

    Raises InputError where transformers does not take the config or vLLM would not run it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    require_config(config, "config")
    text = text_config(read_json(target.path / "config.json"))
    config = with_vocabulary(config, text) | {"dtype": dtype}
    if reasons := draftable(config):
        raise InputError(f"config: no drafter for vLLM: {'; '.join(reasons)}")
    torch.manual_seed(seed)
    try:
        made_of = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = AutoModelForCausalLM.from_config(made_of, trust_remote_code=False)
    except ValueError as e:
        raise InputError(f"config: no causal LM ({str(e).splitlines()[0]})") from None
    with new_folder(out) as temp:
        model.to(DTYPES[dtype]).save_pretrained(temp)
        copy_companions(target.path, temp)
        made = {"step": "init", "target": target.name, "from": "config", "seed": seed, "dtype": dtype,
                "parameters": parameters(read_headers(temp))}  # fmt: skip
        write_json(temp / "pair.json", new_pair(target, made))
        write_card(temp, name=out.name)
        size = sum(t.bytes for t in read_headers(temp).values())
    return {"drafter": str(out), "layers": model.config.num_hidden_layers, **made, "bytes": size}


def fit_budget(target: ModelSource, budget: int) -> tuple[list[int], Width | None]:
    """The widest shape of which two layers keep within `budget` parameters, then as many evenly spaced layers as do.

    Few wide layers rather than many narrow ones: a draft step's time goes by layers. Raises InputError where even
    the narrowest is too large: the vocabulary's rows alone set a floor.
    """
    config = read_json(target.path / "config.json")
    _require_known(target.name, config, read_headers(target.path))
    of, old = int(config["num_hidden_layers"]), shape_of(config)
    smallest = None
    for shape in shapes_below(old, config["architectures"][0]):
        width = None if shape == old else Width(shape)
        fits: list[int] | None = None
        for count in range(min(2, of), of + 1):
            layers = spaced(count, of) if of > 1 else [0]
            size = int(plan_init(target, layers, None, width)["parameters"])
            smallest = min(smallest or size, size)
            if size > budget:
                break
            fits = layers
        if fits:
            return fits, width
    raise InputError(
        f"at most {budget} parameters: two layers of the narrowest shape have {smallest} already, most of them vocabulary: "
        "ask for more (params=… or ratio=…)"
    )


def chosen_width(target: ModelSource, **sizes: int | None) -> Width | None:
    """The width asked for by `narrower`'s keys, None where it is the target's. Raises InputError as that does."""
    config = read_json(target.path / "config.json")
    _require_known(target.name, config, read_headers(target.path))
    old = shape_of(config)
    shape = narrower(old, config["architectures"][0], **sizes)
    return None if shape == old else Width(shape)


def with_vocabulary(config: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """`config` with the rows and special ids of the target's text config; ids that it leaves out are left out."""
    own = {k: v for k, v in config.items() if k not in SPECIAL}
    return own | {"vocab_size": target["vocab_size"]} | {k: target[k] for k in SPECIAL if k in target}


def copy_companions(source: Path, goal: Path) -> None:
    """Copies what a model folder needs beside config and weights: tokenizer, chat templates, generation config."""
    for name in (*TOKENIZER_FILES, "chat_template.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, goal / name)
    for template in source.glob("*.jinja"):
        shutil.copyfile(template, goal / template.name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", goal / "additional_chat_templates")


def _require_known(name: str, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
    architecture = (config.get("architectures") or [config.get("model_type")])[0]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{name}: cannot cut layers out of a {architecture}: one of {', '.join(ARCHITECTURES)} is needed; "
            "any drafter folder with the target's tokenizer can be distilled instead"
        )
    if "quantization_config" in config:
        raise InputError(f"{name}: its weights are quantized: init needs the target's 16- or 32-bit weights")
    for tensor, info in tensors.items():
        prefix = ARCHITECTURES[architecture]
        known = (
            tensor in HEAD_NAMES
            or tensor.endswith(SKIPPED)
            or (tensor.startswith(prefix) and (LAYER.fullmatch(tensor) or WHOLE.fullmatch(tensor.removeprefix(prefix))))
        )
        if not known or info.dtype not in HEADER_DTYPES:
            raise InputError(f"{name}: its tensor {tensor} ({info.dtype}) is not one that a {architecture} has")
    if not isinstance(config.get("num_hidden_layers"), int):
        raise InputError(f"{name}: its config.json names no num_hidden_layers, so no layers can be chosen")


def _require_layers(layers: list[int], of: int) -> None:
    if not layers or layers[0] < 0 or layers[-1] >= of or any(a >= b for a, b in pairwise(layers)):
        raise InputError(f"layers={layers}: give ascending, different numbers from 0 to {of - 1}")


def _require_head(target: ModelSource, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
    """The tied flag must be true to the weights, or two engines read two different models (fault D16)."""
    if "tie_word_embeddings" not in config:
        from transformers import CONFIG_MAPPING

        config["tie_word_embeddings"] = bool(CONFIG_MAPPING[config["model_type"]].from_dict(config).tie_word_embeddings)
    first, last = (next((n for n in tensors if n.endswith(ends)), None) for ends in (EMBEDDINGS, HEAD_NAMES))
    if first is None:
        raise InputError(f"{target.name}: its weights hold no embedding")
    head = tensors[last] if last else None
    if not config["tie_word_embeddings"] and head is None:
        raise InputError(f"{target.name}: config.json says that the head is not tied, and the weights hold no head")
    if config["tie_word_embeddings"] and head is not None:
        with safe_open(tensors[first].file, framework="pt") as a, safe_open(head.file, framework="pt") as b:
            same = torch.equal(a.get_tensor(first), b.get_tensor(last))
        if not same:
            raise InputError(
                f"{target.name}: config.json says that the head is tied to the embedding, and {last} differs "
                "from it: set tie_word_embeddings to false, or delete that tensor"
            )


def _cut_config(config: dict[str, Any], layers: list[int], of: int) -> dict[str, Any]:
    """The layer-wise lists cut to the chosen layers, the count set, all else as it is.

    Where the kinds of the layers are computed from a pattern they are written out: the pattern would count anew.

    Named, not guessed from their length: eos_token_id may be a list too, as long as a small model is deep.
    """
    cut = {k: [v[i] for i in layers] if k in LAYERWISE and len(v or []) == of else v for k, v in config.items()}
    cut["num_hidden_layers"] = len(layers)
    if "layer_types" not in config and (kinds := layer_kinds(config)):
        cut["layer_types"] = [kinds[i] for i in layers]
    cut.pop("_name_or_path", None)
    return cut
