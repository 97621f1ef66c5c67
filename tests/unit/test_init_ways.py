"""The ways of `draftsmith init` beside plain layers: width, influence, budget, donor, config; and what does not go together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pairing.alignment import check_pair
from pairing.decode_time import StepTime, Timer
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.pair import read_pair
from pairing.source import load_model, resolve
from recipes import init as recipe
from tests import architectures, tiny
from tests.stored_answers import made_up, store


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "target", layers=4)


@pytest.fixture
def answers(tmp_path: Path, target: Path) -> Path:
    return store(tmp_path / "answers", made_up([10, 12, 8]), target)


def init(capsys: pytest.CaptureFixture[str], target: Path, *words: str) -> dict[str, Any]:
    out = target.parent / "drafter"
    assert recipe.main([f"target={target}", f"out={out}", "--json", *words]) == 0
    return dict(json.loads(capsys.readouterr().out))


def aligned(target: Path) -> bool:
    return bool(check_pair(resolve(str(target)), resolve(str(target.parent / "drafter")))["aligned"])


def test_width_and_influence(target: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["count=2", "by=influence", "ffn=64", f"answers={answers}", "texts=2"]
    plan = init(capsys, target, *words, "--dry-run")
    result = init(capsys, target, *words)
    assert plan["parameters"] == result["parameters"]
    assert len(result["layers"]) == 2
    assert result["width"]["ffn"] == 64
    assert load_model(target.parent / "drafter").model.layers[0].mlp.up_proj.weight.shape == (64, 64)
    made = read_pair(target.parent / "drafter")["made"][0]
    assert made["by"] == "influence"
    assert made["texts"] == 2
    assert 2 * 20 + 18 <= made["tokens"] <= 2 * 20 + 22  # two prompts of 20 and two of the three answers
    assert len(made["influence"]) == 4
    best = sorted(range(4), key=lambda i: -made["influence"][i])[:2]
    assert result["layers"] == sorted(best)
    assert aligned(target)


def test_a_budget(target: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = init(capsys, target, "layers=all", "--dry-run")["parameters"]
    three = init(capsys, target, "count=3", "--dry-run")["parameters"]
    assert init(capsys, target, f"params={three}", "--dry-run")["layers"] == [0, 2, 3]
    assert init(capsys, target, f"params={(three + 1) / 1000}k", "--dry-run")["layers"] == [0, 2, 3]
    assert init(capsys, target, f"ratio={three}/{whole}", "--dry-run")["parameters"] <= three
    assert init(capsys, target, "ratio=1/1")["layers"] == [0, 1, 2, 3]
    assert aligned(target)
    with pytest.raises(InputError, match="exists already"):
        init(capsys, target, f"params={three}")
    shutil.rmtree(target.parent / "drafter")
    made = init(capsys, target, f"params={three}")
    assert sum(p.numel() for p in load_model(target.parent / "drafter").parameters()) == made["parameters"] <= three
    assert aligned(target)
    with pytest.raises(InputError, match="most of them vocabulary"):
        init(capsys, target, "params=1k")
    for word in ("params=many", "params=infM", "ratio=1e400", "ratio=nan"):
        with pytest.raises(InputError, match="params as 30M"):
            init(capsys, target, word)


def test_a_narrower_one_needs_text(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"ffn needs answers=…"):
        init(capsys, target, "ffn=64")
    with pytest.raises(InputError, match=r"by needs answers=…"):
        init(capsys, target, "by=influence")


def test_answers_of_another_target(target: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.folder(target.parent / "other", layers=4, seed=9)
    with pytest.raises(InputError, match="written by another target"):
        init(capsys, other, "ffn=64", f"answers={answers}")


def test_a_donor(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D5 on the command line: an override by the user, in YAML."""
    donor = tiny.folder(target.parent / "donor", layers=1, swap=(50, 60), rows=264)
    words = [f"donor={donor}", 'map={"<|im_start|>": "<|im_end|>"}']
    plan = init(capsys, target, *words, "--dry-run")
    result = init(capsys, target, *words)
    assert plan["copied"] == result["copied"] == 258
    assert result["user"] == 1
    new, old = (load_model(p).model.embed_tokens.weight for p in (target.parent / "drafter", donor))
    assert torch.equal(new[[50, 60, 1]], old[[60, 50, 2]])
    assert aligned(target)


def test_a_config(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.json"
    shape = {"model_type": "llama", "vocab_size": 7, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 512}  # fmt: skip
    write_json(file, shape)
    result = init(capsys, target, f"config={file}", "seed=3")
    config = read_json(target.parent / "drafter" / "config.json")
    assert (config["vocab_size"], config["eos_token_id"], config["hidden_size"]) == (tiny.ROWS, 2, 32)
    model = load_model(target.parent / "drafter")
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert aligned(target)
    write_json(file, shape | {"model_type": "gemma2", "num_hidden_layers": 4})
    with pytest.raises(InputError, match="mixes layer types"):
        recipe.main([f"target={target}", f"out={tmp_path / 'two'}", f"config={file}"])
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["params=3M", "count=2"],
        ["params=3M", "ratio=1/2"],
        ["draft_step=0.2", "count=2"],
        ["donor=x", "layers=[0]"],
        ["config=x.json", "ffn=64", "answers=y"],
        ["donor=x", "config=x.json"],
    ],
)
def test_one_way_at_a_time(target: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(InputError, match="give one way to make a drafter"):
        init(capsys, target, *words)


def test_words_for_people(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main([f"target={target}", f"out={target.parent / 'one'}", "count=2"]) == 0
    assert "layers [0, 3] of 4" in capsys.readouterr().out
    donor = tiny.folder(target.parent / "donor", layers=1)
    assert recipe.main([f"target={target}", f"out={target.parent / 'two'}", f"donor={donor}"]) == 0
    out = capsys.readouterr().out
    assert "259 tokens (259 copied)" in out
    assert "2 '<|im_end|>': <|im_end|> (copied)" in out


def test_a_draft_step_is_checked_before_it_is_measured(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"draft_step=1\.5: give a share"):
        init(capsys, target, "draft_step=1.5")
    for key, value, says in (
        ("architectures", ["FooForCausalLM"], "cannot cut layers out of a FooForCausalLM"),
        ("num_hidden_layers", None, "names no num_hidden_layers"),
    ):
        odd = tmp_path / key
        shutil.copytree(target, odd)
        write_json(odd / "config.json", read_json(odd / "config.json") | {key: value})
        for words in (["draft_step=0.5", "--dry-run"], ["draft_step=0.5"], ["params=1M"], ["ratio=1/2"]):
            with pytest.raises(InputError, match=says):
                init(capsys, odd, *words)
    plan = init(capsys, target, "draft_step=12ms", "--dry-run")
    assert plan["draft_step"] == "12 ms"
    assert "decode steps of the target and of drafters" in plan["would_measure"]
    assert "narrower ones need answers" in plan["would_measure"]
    assert not (target.parent / "drafter").exists()


def test_a_draft_step_that_needs_a_narrower_width(
    target: Path, answers: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is a stand-in, layers x hidden channels; the real one is in tests/integration/test_draft_step.py."""

    @contextmanager
    def clock(_env: Any, _log: Path) -> Iterator[Timer]:
        def timer(configs: Sequence[Mapping[str, Any]]) -> list[StepTime]:
            ms = [float(c["num_hidden_layers"] * c["hidden_size"]) for c in configs]
            return [StepTime((x, x, x), (x / ms[0],) * 3) for x in ms]

        yield timer

    monkeypatch.setattr(recipe, "open_timer", clock)
    wide = tiny_wide(target.parent / "wide")
    own = store(target.parent / "own", made_up([10, 12, 8]), wide)
    with pytest.raises(
        InputError, match=r"0\.3 of the target's step is less than 2 layers of hidden size 128 take: 0\.5"
    ):
        init(capsys, wide, "draft_step=0.3")
    assert not (target.parent / "drafter").exists()
    result = init(capsys, wide, "draft_step=0.4", f"answers={own}")
    assert (result["layers"], result["width"]["hidden"]) == ([0, 2, 3], 64)
    made = read_pair(target.parent / "drafter")["made"][0]
    assert made["draft_step"] == result["draft_step"]
    assert made["texts"] == 3, "channels were chosen on the answers"
    tried = [(t["layers"], t["hidden"], t["measured"]) for t in made["draft_step"]["tried"]]
    assert tried == [(2, 128, 0.5), (2, 64, 0.25), (4, 64, 0.5), (3, 64, 0.375)]
    assert aligned(wide)


def tiny_wide(path: Path) -> Path:
    architectures.model("llama", layers=4).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path
