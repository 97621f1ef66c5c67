"""Strict configs and run folders: every fault at once, the nearest key named, exit 2, another run never overwritten."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from pydantic import Field
from safetensors.torch import save_file

from pairing.errors import InputError, PartFailedError
from pairing.files import new_folder, read_json, write_text
from recipes.check import CheckConfig
from recipes.config import Strict, guarded, parse
from recipes.distill_config import DistillConfig
from recipes.generate import GenerateConfig
from recipes.init import InitConfig
from recipes.run_folder import open_run
from tests.conftest import ROOT


class Inner(Strict):
    learning_rate: float = 1e-3
    """step size"""
    steps: int = Field(default=10, ge=1)
    """how many"""


class DemoConfig(Strict):
    target: str
    """the model"""
    kind: Literal["a", "b"] = "a"
    """one of two"""
    train: Inner = Inner()
    sets: dict[str, Inner] = Field(default_factory=dict)
    """by name"""
    layers: list[int] | None = None
    """numbers"""


def faults(*argv: str) -> list[str]:
    with pytest.raises(InputError) as e:
        parse(DemoConfig, list(argv))
    return str(e.value).splitlines()


def test_defaults_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("target: x\ntrain: {steps: 5}\nsets: {one: {steps: 2}}\n")
    config, args = parse(DemoConfig, ["--config", str(file), "train.learning_rate=1e-4", "sets.two.steps=3", "--json"])
    assert config.target == "x"
    assert config.train == Inner(learning_rate=1e-4, steps=5)
    assert config.sets == {"one": Inner(steps=2), "two": Inner(steps=3)}
    assert args.json
    assert not args.dry_run


def test_overrides_are_read_as_they_look() -> None:
    config, _ = parse(DemoConfig, ["target=a=b", "layers=[0, 3]"])
    assert config.target == "a=b"
    assert config.layers == [0, 3]
    config, _ = parse(DemoConfig, ["target=x", "layers=null", "train.steps=1", "train.steps=2"])
    assert config.train.steps == 2  # the later one wins
    config, _ = parse(DemoConfig, ["--dry-run", "m", "kind=b"], positional=("target",))
    assert (config.target, config.kind) == ("m", "b")
    config, _ = parse(DemoConfig, ["--dry-run", "kind=b", "--json", "m"], positional=("target",))
    assert config.target == "m"


def test_a_misspelt_key_names_the_nearest() -> None:
    assert faults("target=x", "knid=b") == ["command line: knid: unknown key; the nearest valid one is kind"]
    assert faults("target=x", "train.lerning_rate=1") == [
        "command line: train.lerning_rate: unknown key; the nearest valid one is train.learning_rate"
    ]
    assert faults("target=x", "sets.one.step=1") == [
        "command line: sets.one.step: unknown key; the nearest valid one is sets.one.steps"
    ]


def test_all_faults_at_once() -> None:
    lines = faults("kind=c", "train.steps=0", "train.learning_rate=fast", "nothing=1")
    assert len(lines) == 5
    text = "\n".join(lines)
    assert "target: needs a value: give target=…" in text
    assert "kind: input should be 'a' or 'b', got 'c'" in text
    assert "train.steps: input should be greater than or equal to 1, got 0" in text
    assert "train.learning_rate: " in text
    assert "got 'fast'" in text
    assert "nothing: unknown key" in text


def test_words_that_fit_nowhere() -> None:
    assert faults("target=x", "stray") == ["'stray' is no key.path=value override"]
    assert faults("target=x", "kind.deeper=1")[0].startswith("command line: kind: ")
    assert faults("target=x", "kind=a", "kind.deeper=1") == ["kind.deeper=1: kind is a value, not a group of keys"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1, 2", "not valid YAML"),
        ("- 1\n- 2\n", "holds no keys"),
        ("", "holds no keys"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_yaml_that_is_none(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (line,) = faults("--config", str(file))
    assert line.startswith(f"{file}: {what}")
    file.write_bytes(b"\xff\xfe\x00")
    assert "not valid YAML" in faults("--config", str(file))[0]
    file.unlink()
    assert faults("--config", str(file)) == [f"{file}: no such config file"]


def test_off_is_a_word_where_a_key_has_it_and_false_where_it_is_a_switch(tmp_path: Path) -> None:
    class Switches(Strict):
        drafting: Literal["both", "off"] = "both"
        record: bool = True

    file = tmp_path / "c.yaml"
    file.write_text("drafting: off\nrecord: no\n")
    for words in (["--config", str(file)], ["drafting=off", "record=off"], ["drafting=off", "record=false"]):
        config, _ = parse(Switches, words)
        assert (config.drafting, config.record) == ("off", False)


def test_yaml_faults_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("target: x\ntrain: {steps: 1\nkind: a\n")
    assert "line 3" in faults("--config", str(file))[0]


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse(DemoConfig, ["--help"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    for line in ("target required   the model", "train.steps = 10   how many", "sets.NAME.steps", "layers = null"):
        assert line in text


@pytest.mark.parametrize("model", [CheckConfig, DistillConfig, GenerateConfig, InitConfig])
def test_help_gives_defaults_as_they_are_written(model: type[Strict], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(model, ["--help"])
    text = capsys.readouterr().out
    assert "Undefined" not in text
    assert "Path(" not in text
    assert "after any of" not in text


def leaves(model: type[Strict], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, field) of each key that takes a value."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, Strict):
            yield from leaves(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_help_gives_the_default_of_every_key_of_distill(capsys: pytest.CaptureFixture[str]) -> None:
    """Each on its own line, as one would type it after `key=`; what has none is said to be required."""
    with pytest.raises(SystemExit):
        parse(DistillConfig, ["--help"])
    said = dict(re.findall(r"^  (\S+) (required|= .*?)(?:   .*)?$", capsys.readouterr().out, re.MULTILINE))
    found = dict(leaves(DistillConfig))
    assert len(found) > 50
    assert said.keys() == found.keys()
    for path, field in found.items():
        if field.is_required():
            assert said[path] == "required", path
        else:
            default = field.get_default(call_default_factory=True)
            value = str(default) if isinstance(default, Path) else default
            assert yaml.safe_load(said[path].removeprefix("= ")) == value, path
    assert [path for path, field in found.items() if field.is_required()] == ["draft", "data"]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (InputError("x: [bold]wrong[/bold]"), 2, "error: x: [bold]wrong[/bold]"),
        (PartFailedError("engine died"), 3, "failed: engine died"),
        (KeyboardInterrupt(), 130, "the same command goes on"),
    ],
)
def test_exit_codes(raised: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: list[str]) -> int:
        raise raised

    assert guarded(main) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert guarded(lambda _: 1) == 1


def test_sigterm_ends_a_recipe_as_ctrl_c_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the rank of a launcher: it must die at once, wherever it waits."""
    cleaned: list[str] = []

    def main(_: list[str]) -> int:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # or we would end the tests
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            cleaned.append("what was started")
        return 0

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert guarded(main) == 143
    assert cleaned == ["what was started"]
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert guarded(lambda _: int(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)) == 1


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def main(_: list[str]) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        guarded(main)


def test_a_full_disk_is_no_fault_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real limit on the size of files, met by a plain file and by weights in a new folder: one line each, nothing left."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def text(_: list[str]) -> int:
        write_text(tmp_path / "a.json", "x" * 5000)
        return 0

    def weights(_: list[str]) -> int:
        with new_folder(tmp_path / "model") as temp:
            save_file({"w": torch.zeros(5000)}, temp / "model.safetensors")
        return 0

    def unrelated(_: list[str]) -> int:
        (tmp_path / "nothing").read_text()
        return 0

    for main, name in ((text, "a.json"), (weights, "model")):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))
            assert guarded(main) == 3
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"failed: {tmp_path / name} could not be written (File too large)")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        guarded(unrelated)


@pytest.mark.parametrize("launch", [["recipes/init.py"], ["-m", "recipes.init"], ["-m", "recipes.cli", "init"]])
def test_wrong_input_ends_with_2_by_each_launch(tmp_path: Path, launch: list[str]) -> None:
    """By path, as a module and as the command; by path also from another folder."""
    code = ["-c", "from recipes.cli import main; main()"] if launch[1:2] == ["recipes.cli"] else launch[:2]
    words = [*code, *launch[2:], "target=x/y", f"out={tmp_path / 'o'}", "lyers=[0]"]
    cwd = ROOT
    if launch == ["recipes/init.py"]:
        words[0], cwd = str(ROOT / words[0]), tmp_path
    run = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr.strip() == "error: command line: lyers: unknown key; the nearest valid one is layers"
    assert run.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_same_config_goes_on_in_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = DemoConfig(target="x", train=Inner(steps=3))
    assert open_run(out, config) is False
    provenance = read_json(out / "provenance.json")
    assert provenance["versions"]["torch"].startswith("2.")
    assert provenance["argv"]
    assert open_run(out, config) is True
    assert read_json(out / "provenance.json") == provenance


def test_another_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    open_run(out, DemoConfig(target="x"))
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"holds another run \(its config differs in target, train\)"):
        open_run(out, DemoConfig(target="y", train=Inner(steps=3)))
    assert (out / "metrics.jsonl").read_text() == "{}\n"
    assert open_run(out, DemoConfig(target="x")) is True
    assert open_run(out, DemoConfig(target="y"), free=("target",)) is True
    with pytest.raises(InputError, match=r"differs in target, train"):
        open_run(out, DemoConfig(target="x", train=Inner(steps=3)), free=("target",))
    assert open_run(out, DemoConfig(target="y")) is True


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="no run folder"):
        open_run(tmp_path, DemoConfig(target="x"))
    with pytest.raises(InputError, match="no run folder"):
        open_run(tmp_path / "mine.txt", DemoConfig(target="x"))
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_run_that_was_killed_before_its_config_stood(tmp_path: Path) -> None:
    """provenance.json is written first: a kill between the two must not lock the folder."""
    out = tmp_path / "run"
    open_run(out, DemoConfig(target="x"))
    (out / "config.yaml").unlink()
    assert open_run(out, DemoConfig(target="x")) is False
