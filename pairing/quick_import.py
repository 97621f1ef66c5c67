"""transformers' import without its waste, for a process that `check` has to itself: the same module, in half the time.

On import transformers reads the source of every model twice, for the names in it, and the list of files of every
installed package, to know which of them has which version: 2 s of the 5 that `check` may take. Here each source is read
once and a package is looked up by its own name. A version of transformers that has no such functions is imported as it is.
"""

from __future__ import annotations

import copyreg
import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SCANS = "transformers.utils.import_utils"  # the functions that transformers/__init__.py reads its models' names with


def quick_import() -> None:
    """Imports transformers; nothing where it is imported already."""
    if "transformers" in sys.modules:
        return
    real = importlib.metadata.packages_distributions
    finder = _Patched()
    importlib.metadata.packages_distributions = _OnDemand
    sys.meta_path.insert(0, finder)
    try:
        import transformers  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = real


class _OnDemand(dict[str, list[str]]):
    """`importlib.metadata.packages_distributions()` as far as transformers asks it: for the distributions of one package."""

    def get(self, package: str, default: Any = None) -> Any:
        try:
            return [importlib.metadata.distribution(package).name]
        except importlib.metadata.PackageNotFoundError:  # PIL, distributed as pillow
            if not self:
                self.update(importlib.metadata.packages_distributions())
            return super().get(package, default)


class _Patched(MetaPathFinder):
    """Finds the module of the scans as Python does, and changes two of its functions as soon as it is there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == SCANS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function, made in (("fetch__all__", _from_its_last_line), ("create_import_structure_from_path", _once)):
                if old := getattr(module, function, None):
                    setattr(module, function, made(old))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _from_its_last_line(fetch: Callable[[str], Any]) -> Callable[[str], Any]:
    """It looks at every line of a file for the last one that starts with __all__, which is near the end."""
    return lambda content: fetch(content[content.rfind("\n__all__") + 1 :])


def _once(scan: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A folder's names, kept: transformers' own module and that of its models ask for the same folders."""
    kept = functools.cache(scan)
    return lambda path: kept(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))


@contextmanager
def shared_tokenizers() -> Iterator[None]:
    """Within it a copy of a tokenizer is the tokenizer: transformers copies each one that it has just read from a file
    and keeps the copy, which takes as long as reading it."""
    from tokenizers import Tokenizer

    old = copyreg.dispatch_table.get(Tokenizer)
    copyreg.pickle(
        Tokenizer, lambda _: "Tokenizer"
    )  # a string: what copy takes for "one object, wherever it is needed"
    try:
        yield
    finally:
        copyreg.dispatch_table.pop(Tokenizer)
        if old is not None:
            copyreg.dispatch_table[Tokenizer] = old
