"""transformers without torch, for a process that reads configs and tokenizers and never runs a model.

Its configs and tokenizers bring torch and its compiler with them (4 s of 5), though neither needs them: transformers
supports a machine without torch, where models are missing and "tokenizers, configuration and file/data utilities can
be used". This is that state, on a machine that has torch.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pairing.files import read_json
from pairing.quick_import import quick_import

# A config's type is the one thing in it that transformers looks up in torch, and it refuses a config that names another.
DTYPES = (None, "float32", "float16", "bfloat16")


def transformers_without_torch(*folders: Path) -> bool:
    """Whether transformers runs without torch from here on, in this process and for good; True where it does already.

    For the entry point of such a process alone, once the `folders` of its models are there (making one of a GGUF file or
    an adapter runs a model). False, and nothing is changed, where torch or transformers is imported already, or where
    a config names a type of its own.
    """
    if "transformers" in sys.modules or importlib.util.find_spec("torch") is None:
        import transformers

        return not transformers.is_torch_available()
    configs = (read_json(folder / "config.json") for folder in folders)
    if "torch" in sys.modules or any(dtype not in DTYPES for config in configs for dtype in _dtypes(config)):
        return False
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python writes "there is no such module"
    logging.disable(logging.WARNING)  # it would say that PyTorch was not found
    try:
        quick_import()  # asks once whether there is a torch, and keeps the answer
    finally:
        logging.disable(logging.NOTSET)
        del sys.modules["torch"]
    return True


def _dtypes(config: Any) -> Iterator[Any]:
    """Every type named in a config.json, those of its parts too."""
    if isinstance(config, dict):
        yield from (config[key] for key in ("dtype", "torch_dtype") if key in config)
        for value in config.values():
            yield from _dtypes(value)
