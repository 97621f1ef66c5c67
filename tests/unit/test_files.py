"""Files and folders are whole or absent: also when the process is killed in the middle, or the disk is full."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pairing.errors import InputError
from pairing.files import (
    append_jsonl,
    digest_file,
    digest_json,
    new_folder,
    read_json,
    read_jsonl,
    write_bytes,
    write_json,
)
from tests.conftest import ROOT


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def killed_in_the_middle(code: str, started: Path) -> None:
    """Runs `code` in a process of its own and kills it (-9) once the file `started` is there."""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None, "ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(file, {"a": float("nan")})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(file, b"half")
    assert read_json(file) == {"a": 1}
    assert names(tmp_path) == ["a.json"]


def test_reading_what_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.json: no such file"):
        read_json(tmp_path / "a.json")
    for bad in (b'{"a": ', b"\xff\xfe"):
        (tmp_path / "a.json").write_bytes(bad)
        with pytest.raises(InputError, match=r"a\.json: not valid JSON"):
            read_json(tmp_path / "a.json")


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as temp:
        (temp / "sub").mkdir()
        (temp / "sub" / "a").write_text("a")
        os.chmod(temp / "sub" / "a", 0o600)
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "sub" / "a").read_text() == "a"
    assert stat.S_IMODE((tmp_path / "out" / "sub" / "a").stat().st_mode) == 0o644  # a drafter is for sharing
    assert names(tmp_path) == ["out"]


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    def stopped() -> None:
        with new_folder(tmp_path / "out") as temp:
            (temp / "a").write_text("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert names(tmp_path) == []


def test_an_empty_folder_may_be_filled_and_a_used_one_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as temp:
        (temp / "a").write_text("a")
    (tmp_path / "file").write_text("mine")
    for used in ("empty", "file"):
        with pytest.raises(InputError, match="not empty: name another output folder"), new_folder(tmp_path / used):
            pytest.fail("entered")
    assert (tmp_path / "file").read_text() == "mine"


def test_killed_while_a_folder_is_made(tmp_path: Path) -> None:
    """kill -9 in the middle: no folder; what it left is swept by the next try, which succeeds."""
    code = f"""
import time
from pathlib import Path
from pairing.files import new_folder
with new_folder(Path({str(tmp_path)!r}) / "out") as temp:
    (temp / "half").write_text("half")
    (Path({str(tmp_path)!r}) / "started").touch()
    time.sleep(60)
"""
    killed_in_the_middle(code, tmp_path / "started")
    assert not (tmp_path / "out").exists()
    assert [n for n in names(tmp_path) if n.startswith(".out.new-")]
    with new_folder(tmp_path / "out") as temp:
        assert names(temp) == []
        (temp / "whole").write_text("whole")
    assert names(tmp_path) == ["out", "started"]
    assert names(tmp_path / "out") == ["whole"]


def test_killed_while_a_file_is_written(tmp_path: Path) -> None:
    """kill -9 between the write and the rename: the old contents stand."""
    write_json(tmp_path / "a.json", {"old": True})
    code = f"""
import os, time
from pathlib import Path
from pairing.files import write_json
folder = Path({str(tmp_path)!r})
def hang(*_):
    (folder / "started").touch()
    time.sleep(60)
os.replace = hang
write_json(folder / "a.json", {{"old": False}})
"""
    killed_in_the_middle(code, tmp_path / "started")
    assert read_json(tmp_path / "a.json") == {"old": True}


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_jsonl(file) == []
    append_jsonl(file, {"n": 1, "text": "ü\u2028"})
    append_jsonl(file, {"n": 2})
    whole = file.read_bytes()
    for cut in range(1, len(b'{"n": 2}') + 2):
        file.write_bytes(whole[:-cut])
        rows = read_jsonl(file)
        assert [r["n"] for r in rows] == [1], cut
        append_jsonl(file, {"n": 3})
        assert [r["n"] for r in read_jsonl(file)] == [1, 3], cut
        file.write_bytes(whole)
    assert read_jsonl(file)[0]["text"] == "ü\u2028"


def test_a_torn_multibyte_character_is_left_out(tmp_path: Path) -> None:
    """A kill may cut within a character of the last line: the whole lines are still read."""
    file = tmp_path / "rows.jsonl"
    append_jsonl(file, {"n": 1})
    with open(file, "ab") as f:
        f.write('{"text": "ü'.encode()[:-1])
    assert read_jsonl(file) == [{"n": 1}]


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    known = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest_file(tmp_path / "a") == known
    assert digest_json({"b": 1, "a": [1, 2]}) == digest_json(json.loads('{"a": [1, 2], "b": 1}'))
    assert digest_json({"a": [1, 2]}) != digest_json({"a": [2, 1]})
