"""Texts without this machine's folders: what a page or a card says must be fit to publish, and its commands to retype."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HUB = re.compile(r"/[^\s\"'`]*/models--([^/\s]+?)--([^/\s]+)/snapshots/[0-9a-f]+")
# An absolute path of two parts or more: not a part of a URL, of an address's path (/v1/…) or of "tokens/s".
ABSOLUTE = re.compile(r"(?<![\w.:/~<>-])/(?!v\d/)(?:[\w.@+=-]+/)+([\w.@+=-]*\w)/?")


def portable(value: Any, roots: Sequence[tuple[str, str]]) -> Any:
    """`value` with every string in it, keys too, made portable: the hub's cache by hub id, what lies in a root
    (folder, what it is called instead) by that, any other absolute path by its last part."""
    if isinstance(value, dict):
        return {portable(k, roots): portable(v, roots) for k, v in value.items()}
    if isinstance(value, list):
        return [portable(v, roots) for v in value]
    if isinstance(value, tuple):
        return tuple(portable(v, roots) for v in value)
    return _text(str(value), roots) if isinstance(value, str | Path) else value


def roots_of(folder: Path, *others: str | None) -> list[tuple[str, str]]:
    """The working directory (left out: commands are typed there), the run's folder, `others` (where it was written, if it
    has been moved since), the home."""
    own = [folder.absolute(), folder.resolve(), *(Path(o) for o in others if o and Path(o).is_absolute())]
    found = [(str(Path.cwd()), ""), *((str(o), folder.resolve().name) for o in own), (str(Path.home()), "~")]
    return [(root, name) for root, name in dict.fromkeys(found) if root != "/"]


def _text(text: str, roots: Sequence[tuple[str, str]]) -> str:
    if "/" not in text:
        return text
    text = HUB.sub(r"\1/\2", text)
    for root, name in roots:
        here = re.escape(root)
        text = re.sub(rf"(?<![\w.-]){here}/", f"{name}/".replace("\\", r"\\") if name else "", text)
        text = re.sub(rf"(?<![\w.-]){here}(?![\w.-])", name.replace("\\", r"\\") or ".", text)
    return ABSOLUTE.sub(r"\1", text)
