"""Files and folders that are whole or absent: temp beside the goal, fsync, rename; and digests of what is in them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pairing.errors import InputError

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # what a full disk, a limit on a file and a quota say


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """A place where nothing can be written (read-only, no right, a file in the way) is the user's to change."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:  # another place is not what is needed
            raise
        raise InputError(f"{path}: cannot be written ({e.strerror}): name another place") from e


def require_outside(path: Path, *folders: Path) -> None:
    """Raises InputError where `path` lies in one of the `folders`: a model's folder would hold another model."""
    for folder in folders:
        if path.resolve().is_relative_to(folder.resolve()) and path.resolve() != folder.resolve():
            raise InputError(f"{path} lies in {folder}, the folder of a model: name another output folder")


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces `path` atomically: a reader sees the old file or the new one, whole, also after a power cut."""
    if path.is_dir():
        raise InputError(f"{path}: a folder, and a file is to be written there: name a file")
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temp, 0o644)
        os.replace(temp, path)
    except BaseException as e:
        Path(temp).unlink(missing_ok=True)
        e.add_note(str(path))  # an error of a write knows no name
        raise
    _fsync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (no NaN), keys in the given order, two spaces."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises InputError naming the file where it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: not valid JSON ({e})") from None


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Appends one line and fsyncs it. A line torn by a kill is the last one; `read_jsonl` leaves it out.

    A torn line is cut off before the next append, so that it never glues itself to a good one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    with open(path, "ab+") as f:
        end = f.seek(0, os.SEEK_END)
        if end:
            f.seek(end - 1)
            if f.read(1) != b"\n":
                f.seek(0)
                f.truncate(f.read().rfind(b"\n") + 1)
        f.write(line)
        f.flush()
        os.fsync(f.fileno())


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replaces `path` by these rows, atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines; [] where there is no file; a torn last line is left out."""
    if not path.exists():
        return []
    data = path.read_bytes()  # cut before it is decoded: a kill may tear a character; and only \n ends a line of JSON
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line.strip()]


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block ends well, and vanishes when it doesn't.

    Raises InputError where `path` already holds something: user data is never overwritten.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already and is not empty: name another output folder, or move that one away")
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.new-*"):  # left by a kill: never read, so free to go
            shutil.rmtree(stale, ignore_errors=True)
        temp = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new-"))
    try:
        yield temp
        for f in temp.rglob("*"):
            os.chmod(f, 0o755 if f.is_dir() else 0o644)  # mkstemp and safetensors write 0600; a drafter is for sharing
            if f.is_file():
                with open(f, "rb") as h:
                    os.fsync(h.fileno())
        os.chmod(temp, 0o755)
        _fsync_folder(temp)
        if path.exists():
            path.rmdir()
        os.replace(temp, path)
        _fsync_folder(path.parent)
    except BaseException as e:
        shutil.rmtree(temp, ignore_errors=True)
        e.add_note(str(path))
        raise


def digest_file(path: Path) -> str:
    """sha256 of the contents, as `sha256:<hex>`."""
    with open(path, "rb") as f:
        return "sha256:" + hashlib.file_digest(f, "sha256").hexdigest()


def digest_json(value: Any) -> str:
    """sha256 of the canonical JSON of `value` (sorted keys), as `sha256:<hex>`."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
