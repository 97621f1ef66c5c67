"""transformers imported the quick way is the transformers that Python imports; tokenizers that share their copy are the same."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pairing.quick_import import quick_import, shared_tokenizers
from pairing.side import read_side
from pairing.source import load_tokenizer, resolve
from tests import tiny
from tests.conftest import ROOT

CHILD = """
import json, sys
sys.modules["torch"] = None  # as in `check`: with torch the import of its compiler is all that counts
from pairing.quick_import import quick_import
if sys.argv[1] == "quick":
    quick_import()
import transformers
from transformers.utils import import_utils
parts = [transformers, transformers.models, transformers.models.auto, transformers.models.llama]
names = ["_class_to_module", "_object_missing_backend", "__all__"]
found = [{n: dict(v) if isinstance(v := getattr(p, n), dict) else sorted(v) for n in names} for p in parts]
asked = {n: import_utils._is_package_available(n, return_version=True) for n in ("tokenizers", "PIL", "jinja2", "nobody")}
print(json.dumps([found, asked, import_utils.fetch__all__.__module__], sort_keys=True))
"""


def child(way: str) -> list[Any]:
    # of names that two files export transformers takes either, as their sets are ordered by the seed
    env = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, way], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return list(json.loads(done.stdout))


def test_the_same_module() -> None:
    """Every name of every model, where it is found and what it needs; versions of packages, pillow's too."""
    found, asked, made_by = child("quick")
    assert made_by == "pairing.quick_import"  # else the test compares a thing with itself
    plain, plainly_asked, own = child("plain")
    assert own == "transformers.utils.import_utils"
    assert len(found[0]["_class_to_module"]) > 1000
    assert found == plain
    assert asked == plainly_asked
    assert asked["nobody"] == [False, "N/A"]


def test_nothing_changes_where_it_is_imported_already() -> None:
    before = list(sys.meta_path)
    quick_import()
    assert sys.meta_path == before


def test_shared_tokenizers_are_the_same(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model")
    shared, own = read_side(resolve(str(folder))).tokenizer, load_tokenizer(folder)
    assert type(shared) is type(own)
    assert shared.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert shared.init_kwargs == own.init_kwargs
    assert shared("a<|im_end|> b") == own("a<|im_end|> b")


def test_copies_are_copies_again_outside() -> None:
    raw = tiny.tokenizer().backend_tokenizer
    with shared_tokenizers():
        assert copy.deepcopy(raw) is raw
    other = copy.deepcopy(raw)
    other.add_tokens(["more"])
    assert other.token_to_id("more") is not None
    assert raw.token_to_id("more") is None
    assert isinstance(pickle.loads(pickle.dumps(raw)), Tokenizer)
