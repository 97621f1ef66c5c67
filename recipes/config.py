"""Strict configs: a YAML file, then `key.path=value` overrides, checked as a whole before any weight is read."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from safetensors import SafetensorError

from pairing.errors import InputError, PartFailedError
from pairing.files import FULL


class Strict(BaseModel):
    """Unknown keys are errors, and a field's description is its line in --help."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)


C = TypeVar("C", bound=Strict)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's booleans, true and false: to YAML 1.1 `off` is one, too, and some keys have it as a word. Keys that are
    booleans take on, off, yes and no all the same, by pydantic's reading of text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(
    model: type[C], argv: list[str], positional: tuple[str, ...] = (), about: str = ""
) -> tuple[C, argparse.Namespace]:
    """Reads `[POSITIONAL …] [--config FILE] [key.path=value …] [--dry-run] [--json]` into `model`.

    Later overrides win over earlier ones and over the file. Raises InputError with every fault, a line each.
    """
    parser = argparse.ArgumentParser(
        prog=f"draftsmith {model.__name__.removesuffix('Config').lower()}",
        description=about,
        epilog="keys and defaults:\n" + "\n".join(_describe(model)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key.path=value",
        help="overrides" + (", after " + " ".join(positional) if positional else ""),
    )
    parser.add_argument("--config", type=Path, help="a YAML file with the keys below")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    args = parser.parse_intermixed_args(argv)  # overrides may stand on either side of --json
    values = read_yaml(args.config) if args.config else {}
    plain = [w for w in args.words if "=" not in w]
    if len(plain) > len(positional):
        raise InputError(f"{plain[len(positional)]!r} is no key.path=value override")
    for key, word in [*zip(positional, plain, strict=False)]:
        values[key] = word
    for word in args.words:
        if "=" in word:
            _set(values, *word.split("=", 1))
    return validate(model, values, str(args.config or "command line")), args


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise InputError(f"{path}: no such config file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(e).split())})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no keys")
    return values


def validate(model: type[C], values: dict[str, Any], where: str) -> C:
    try:
        return model.model_validate(values)
    except ValidationError as e:
        lines = [_explain(model, dict(err)) for err in e.errors()]
        raise InputError("\n".join(f"{where}: {line}" for line in lines)) from None


def _set(values: dict[str, Any], path: str, text: str) -> None:
    """One override. The value is read as YAML, so `3`, `true`, `[0,1]` and plain words mean what they look like."""
    *parents, last = path.split(".")
    for key in parents:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise InputError(f"{path}={text}: {key} is a value, not a group of keys")
    try:
        values[last] = yaml.load(text, _Loader) if text else ""
    except yaml.YAMLError:
        values[last] = text


def _inner(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation: `Model`, `Model | None`, `dict[str, Model]`, `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in typing.get_args(annotation) for m in _inner(a)]


def _explain(model: type[BaseModel], error: dict[str, Any]) -> str:
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        owner: type[BaseModel] = model
        for part in error["loc"][:-1]:
            field = owner.model_fields.get(str(part))
            inner = _inner(field.annotation) if field else []
            owner = inner[0] if inner else owner  # a key of a dict of models leaves the owner as it is
        near = difflib.get_close_matches(str(error["loc"][-1]), list(owner.model_fields), n=1, cutoff=0.0)
        return f"{path}: unknown key; the nearest valid one is {'.'.join([*map(str, error['loc'][:-1]), *near])}"
    if error["type"] == "missing":
        return f"{path}: needs a value: give {path}=…"
    if error["type"] == "value_error":  # raised by a validator of ours, whose words are whole
        return f"{path}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
    return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _describe(model: type[BaseModel], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        origin = typing.get_origin(field.annotation)
        if inner and origin in (None, typing.Union, types.UnionType):
            lines += _describe(inner[0], f"{prefix}{name}.")
        elif inner:
            lines += _describe(inner[0], f"{prefix}{name}.NAME.")
        else:
            default = (
                "required" if field.is_required() else f"= {_as_typed(field.get_default(call_default_factory=True))}"
            )
            about = " ".join((field.description or "").split())
            lines.append(f"  {prefix}{name} {default}" + (f"   {about}" if about else ""))
    return lines


def _as_typed(value: Any) -> str:
    """A default as one would write it after `key=`: YAML on one line."""
    if isinstance(value, Path | str):
        return str(value) or '""'
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken the way of Ctrl-C: what was started is ended, what was begun stays resumable."""


def _terminate(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends us at once; the kernel then ends what we started
    raise Terminated


def guarded(main: typing.Callable[[list[str]], int]) -> int:
    """Runs a recipe on sys.argv and turns what it raises into the project's exit codes (see docs, Commands).

    Only InputError is the user's; any other exception is a fault of ours and keeps its traceback. SIGTERM ends a recipe as
    Ctrl-C does, but for the ranks of a launcher: theirs ends them at once, also one that waits in a collective for a dead
    peer and so would run no handler.
    """
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    taken = "LOCAL_RANK" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if taken:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        return main(sys.argv[1:])
    except InputError as e:
        err.print(f"error: {e}", style="red", markup=False)
        return 2
    except PartFailedError as e:
        err.print(f"failed: {e}", style="red", markup=False)
        return 3
    except (OSError, SafetensorError) as e:
        reason = _full(e)
        if reason is None:
            raise
        err.print(f"failed: {reason}", style="red", markup=False)
        return 3
    except KeyboardInterrupt as e:
        err.print("stopped; the same command goes on from here", markup=False)
        return 143 if isinstance(e, Terminated) else 130
    finally:
        if taken:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _full(e: OSError | SafetensorError) -> str | None:
    """What a full disk stopped, in one line; None where that is not what it was. safetensors tells the reason in words."""
    told = re.search(r"\b(?:os error|code:) (\d+)", str(e)) if isinstance(e, SafetensorError) else None
    number = int(told[1]) if told else getattr(e, "errno", None)
    if number not in FULL:
        return None
    # the outermost file or folder, which is the one that has a name of its own
    where = next(reversed(getattr(e, "__notes__", [])), None) or getattr(e, "filename", None) or "a file"
    return (
        f"{where} could not be written ({os.strerror(number)}); what was finished before is whole: make room and "
        "start the same command again"
    )
