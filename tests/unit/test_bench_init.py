"""scripts/bench_init.py on a tiny target: equal sizes, a line a run, nothing run twice, and the speed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from pairing.decode_time import StepTime
from pairing.files import read_jsonl
from pairing.init import Width, plan_init
from pairing.source import resolve
from scripts import bench_init
from tests import architectures, tiny
from tests.stored_answers import made_up, store


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "target"
    architectures.model("llama", layers=8, hidden=256).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def test_families_of_equal_size(target: Path) -> None:
    shapes = bench_init.shapes_of(resolve(str(target)), [2, 4])
    assert [s["name"] for s in shapes] == ["depth-2", "width-2", "both-2", "depth-4", "width-4", "both-4"]
    size = {s["name"]: s["parameters"] for s in shapes}
    for n in (2, 4):
        assert max(size[f"width-{n}"], size[f"both-{n}"]) <= size[f"depth-{n}"]
    assert [len(s["layers"]) for s in shapes] == [2, 8, 4, 4, 8, 6]
    assert [s["width"] is None for s in shapes] == [True, False, False] * 2


def test_each_size_has_its_own_width_near_its_parameters(tmp_path: Path) -> None:
    """SmolLM2-135M's layers: its 9 heads divide few hidden sizes, so that the FFN must make the difference."""
    shape = architectures.shape(layers=12, heads=9, kv_heads=3, head_dim=64, hidden=576) | {"intermediate_size": 1536}
    LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    shapes = bench_init.shapes_of(source, [2, 3, 5])
    assert len({(len(s["layers"]), s["width"]) for s in shapes}) == 9
    most = {s["size"]: s["parameters"] for s in shapes if s["family"] == "depth"}
    for s in (s for s in shapes if s["width"]):
        wider = Width(replace(s["width"], ffn=s["width"].ffn + 64))
        assert s["parameters"] <= most[s["size"]] < plan_init(source, s["layers"], None, wider)["parameters"]


def test_a_bench_in_two_parts_that_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timing is a stand-in: the real one is in tests/integration/test_draft_step.py."""
    train, heldout = (store(tmp_path / f"a{i}", made_up([9, 12, 8], seed=i), target) for i in range(2))
    out = tmp_path / "out"
    words = ["--target", str(target), "--train", str(train), "--heldout", str(heldout), "--out", str(out)]
    words += ["--sizes", "2", "--steps", "2", "--batch-size", "2"]
    assert bench_init.main([*words, "--seeds", "0", "--train-only"]) == 0
    first = read_jsonl(out / "results.jsonl")
    assert [(r["name"], r["seed"], r["steps"]) for r in first] == [
        ("depth-2", 0, 2),
        ("width-2", 0, 2),
        ("both-2", 0, 2),
    ]
    assert all(r["before"]["alpha_low"] != r["after"]["alpha_low"] for r in first), "training changed nothing"
    assert not list((out / "training").iterdir())
    (out / "results.jsonl").write_text((out / "results.jsonl").read_text() + '{"kind": "tr')  # killed while writing
    assert bench_init.main([*words, "--seeds", "0", "1", "--train-only"]) == 0
    rows = read_jsonl(out / "results.jsonl")
    assert rows[:3] == first
    assert [(r["name"], r["seed"]) for r in rows[3:]] == [("depth-2", 1), ("width-2", 1), ("both-2", 1)]

    def timer(configs: Sequence[Mapping[str, Any]], verify: int = 0) -> list[StepTime]:
        times = [float(config["num_hidden_layers"]) for config in configs]
        times += [1.5 * times[0]] if verify else []
        return [StepTime((t, t, t), (t / times[0],) * 3) for t in times]

    args = bench_init.argparse.Namespace(out=out)
    shapes = bench_init.shapes_of(resolve(str(target)), [2])
    bench_init.time_all(args, resolve(str(target)), shapes, timer)
    bench_init.time_all(args, resolve(str(target)), shapes, lambda *_, **__: pytest.fail("timed again"))
    timed = [r for r in read_jsonl(out / "results.jsonl") if r["kind"] == "time"]
    assert [(r["name"], r["share"][0]) for r in timed] == [("depth-2", 0.25), ("width-2", 1.0), ("both-2", 0.5)]
    text = bench_init.table(read_jsonl(out / "results.jsonl"), None, 0.0)
    assert "v = 1.50 (1.50 to 1.50) measured at K = 4, o = 0;" in text
    assert "v = 1.3, o = 0;" in bench_init.table(read_jsonl(out / "results.jsonl"), 1.3, 0.0)
    assert text.count("\n| ") == 4
    assert "| depth-2 |" in text


def test_the_speed_by_hand() -> None:
    """τ 2 at K = 1 against τ 3 at K = 3: 2 / 1.4 against 3 / 1.8."""
    assert bench_init.best_speed({"1": 2.0, "3": 3.0, "4": None}, 0.2, 1.1, 0.1) == (3, pytest.approx(3 / 1.8))
    assert bench_init.best_speed({"1": 2.0, "3": 3.0}, 0.9, 1.1, 0.1)[0] == 1
    shared = {"layers": [0, 1], "width": None, "parameters": 10**6}
    after = {"tau": {"1": 2.0, "4": 3.0}, "top1": 0.5}
    before = {"tau": {"1": 1.0, "4": 1.0}, "top1": 0.0}
    rows = [
        {"kind": "train", "name": name, "seed": 0, "before": before, "after": after, **shared} for name in ("a", "b")
    ]
    rows += [{"kind": "time", "name": name, "share": [c, c, c], **shared} for name, c in (("a", 0.4), ("b", 0.1))]
    lines = bench_init.table(rows, 1.0, 0.0).splitlines()
    assert lines[4].startswith("| b | 1.0M | 2 | the target's | 1.00 (1.00 to 1.00) | 3.00")
    assert lines[4].endswith("| 4 | 2.14 (2.14 to 2.14) |")
    assert lines[5].endswith("| 1 | 1.43 (1.43 to 1.43) |")
