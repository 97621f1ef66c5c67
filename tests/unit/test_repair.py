"""`repair`: old rows bit by bit, padding that cannot win, real tokens that are listed; refusals; nothing done twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pairing.alignment import check_pair
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.mask_token import mask_id_of
from pairing.pair import new_pair, read_pair
from pairing.repair import plan_repair, repair
from pairing.rows import make_rows, mean_row, settle_padding
from pairing.source import digests, load_model, load_tokenizer, resolve
from recipes import repair as recipe
from tests import tiny
from tests.unit.test_alignment import edit, high_token, pair

REAL = tiny.REAL_TOKENS


def mend(a: Path, b: Path, out: Path, **kwargs: Any) -> dict[str, Any]:
    return repair(resolve(str(a)), resolve(str(b)), out, **kwargs)


def report(a: Path, b: Path) -> dict[str, Any]:
    return check_pair(resolve(str(a)), resolve(str(b)))


def vocabulary(folder: Path) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "model.safetensors")
    return {k: v for k, v in weights.items() if k in ("model.embed_tokens.weight", "lm_head.weight")}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [260, 288])
def test_padding_to_the_targets_rows(tmp_path: Path, rows: int, dtype: torch.dtype, tied: bool) -> None:
    """D1: old rows bit-equal on disk and after reload, the rest untouched, tied stays tied."""
    a, b = pair(tmp_path, drafter={"rows": rows, "tied": tied})
    load_model(b, dtype).save_pretrained(b)
    before = digests(b)
    result = mend(a, b, tmp_path / "out")
    assert digests(b) == before
    assert result["rows"] == [rows, 272]
    assert report(a, tmp_path / "out")["verdict"] == "aligned"
    old, new = vocabulary(b), vocabulary(tmp_path / "out")
    assert list(old) == list(new)
    assert ("lm_head.weight" in new) is not tied
    kept = min(rows, 272)
    for name in old:
        assert new[name].dtype == dtype
        assert new[name].shape == (272, 64)
        assert torch.equal(new[name][:kept], old[name][:kept])
    rest, was = load_file(tmp_path / "out" / "model.safetensors"), load_file(b / "model.safetensors")
    assert rest.keys() == was.keys()
    assert all(torch.equal(rest[k], was[k]) for k in rest if k not in new)
    one, other = load_model(b, dtype), load_model(tmp_path / "out", dtype)
    assert other.config.tie_word_embeddings is tied
    assert (other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()) is tied
    assert torch.equal(other.model.embed_tokens.weight[:kept], one.model.embed_tokens.weight[:kept])
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(other(ids).logits[..., :kept], one(ids).logits[..., :kept])


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_never_win_whatever_the_hidden_state(shift: float, dtype: torch.dtype) -> None:
    """Also where every real logit is negative, where a row of zeros would win; and they get little probability."""
    torch.manual_seed(0)
    weight = (torch.randn(120, 16) + shift).to(dtype)
    made = make_rows(weight, {i: _own(i) for i in range(100)}, range(100), 128)
    assert torch.equal(made[:100], weight[:100])
    hidden = torch.cat([torch.randn(2000, 16), torch.randn(1000, 16).abs(), -torch.randn(1000, 16).abs()])
    logits = hidden @ made.float().T
    assert logits[:, 100:].max(1).values.lt(logits[:, :100].max(1).values).all()
    assert logits.argmax(1).max() < 100
    probability = logits.softmax(1)
    share = probability[:, 100:] / probability[:, :100].sum(1, keepdim=True)
    assert share.max() <= 1.02 / 100  # Jensen, and bfloat16's rounding of the mean
    if shift:
        zeros = torch.cat([weight[:100], torch.zeros(28, 16, dtype=dtype)]).float()
        assert (hidden @ zeros.T).argmax(1).max() >= 100  # the test can fail


def _own(i: int) -> Any:
    from pairing.rows import Row

    return Row("copied", (i,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_repaired_drafter_drafts_no_padding(tmp_path: Path, sign: float) -> None:
    """D1, in the model: a head turned round makes its real logits negative as often as positive."""
    a, b = pair(tmp_path, drafter={"rows": REAL, "tied": False})
    weights = load_file(b / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], sign)
    weights["lm_head.weight"] = weights["lm_head.weight"].abs()
    save_file(weights, b / "model.safetensors", metadata={"format": "pt"})
    mend(a, b, tmp_path / "out")
    torch.manual_seed(1)
    with torch.no_grad():
        logits = load_model(tmp_path / "out")(torch.randint(3, REAL, (32, 40))).logits
    assert (logits[..., :REAL].max(-1).values < 0).any()
    assert logits.argmax(-1).max() < REAL


def test_own_padding_rows_stay_unless_asked(tmp_path: Path) -> None:
    """Rows that no token uses stay bit by bit; `quiet_padding` settles them, once."""
    a, b = pair(tmp_path, drafter={"rows": 264})
    weights = load_file(b / "model.safetensors")
    weights["model.embed_tokens.weight"][260] *= 100
    save_file(weights, b / "model.safetensors", metadata={"format": "pt"})
    mend(a, b, tmp_path / "kept")
    (old,), (kept,) = vocabulary(b).values(), vocabulary(tmp_path / "kept").values()
    assert torch.equal(kept[:264], old)
    result = mend(a, tmp_path / "kept", tmp_path / "quiet", quiet_padding=True)
    assert result["mends"] == ["rows of the drafter that no token uses could still be drafted"]
    (quiet,) = vocabulary(tmp_path / "quiet").values()
    assert torch.equal(quiet[:REAL], old[:REAL])
    assert torch.equal(quiet, settle_padding(old_padded(old), range(REAL)))
    assert not mend(a, tmp_path / "quiet", tmp_path / "again", quiet_padding=True)["needed"]


def old_padded(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight, weight[:8]])


def test_a_real_token_that_the_drafter_lacks(tmp_path: Path) -> None:
    """Its rows are the mean of its pieces' rows, it is listed, and pair.json marks it as untrained."""
    a, b = pair(tmp_path, target={"rows": 304}, drafter={"tied": False})
    edit(a / "tokenizer.json", high_token("ab"))
    rep = report(a, b)
    assert rep["repair"]
    mend(a, b, tmp_path / "out")
    tok = load_tokenizer(b)
    pieces = tok.convert_tokens_to_ids(["a", "b"])
    for name, new in vocabulary(tmp_path / "out").items():
        old = vocabulary(b)[name]
        assert torch.equal(new[:272], old)
        assert torch.equal(new[300], old[pieces].mean(0))
        assert torch.equal(new[299], mean_row(old, range(REAL)))
    made = read_pair(tmp_path / "out")
    assert made["needs_training"] == [300]
    assert made["made"][-1]["initialised"] == [{"id": 300, "token": "ab", "how": "pieces", "of": ["a", "b"]}]
    after = report(a, tmp_path / "out")
    assert after["verdict"] == "aligned, with 1 warning"
    (warning,) = [f for f in after["findings"] if f["level"] == "warns"]
    assert warning["what"] == "rows of the drafter that were made and never trained: 1 (300 'ab')"
    assert "trainable=all" in warning["fix"]
    assert "Rows that were made and never trained: 1 (ids 300)" in (tmp_path / "out" / "README.md").read_text()


def test_special_ids_template_and_generation_config_are_the_targets(tmp_path: Path) -> None:
    """D3: eos as a list in the generation config, another template, another eos in the drafter."""
    a, b = pair(tmp_path)
    write_json(a / "generation_config.json", {"eos_token_id": [2, 0], "bos_token_id": 1})
    edit(a / "config.json", lambda v: v.update(eos_token_id=[2, 0]))
    (b / "chat_template.jinja").write_text(tiny.CHATML.replace("assistant", "model"))
    edit(b / "tokenizer_config.json", lambda v: v.update(eos_token="<|endoftext|>"))
    mend(a, b, tmp_path / "out")
    one, other = digests(a), digests(tmp_path / "out")
    assert (one["tokenizer"], one["template"]) == (other["tokenizer"], other["template"])
    assert read_json(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [2, 0]
    assert read_json(tmp_path / "out" / "config.json")["eos_token_id"] == [2, 0]
    assert report(a, tmp_path / "out")["verdict"] == report(a, a)["verdict"]


def test_a_second_run_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(tmp_path, drafter={"rows": 264})
    assert recipe.main([str(a), str(b), f"out={tmp_path / 'out'}"]) == 0
    assert "264 rows to 272" in capsys.readouterr().out
    before = digests(tmp_path / "out")
    assert recipe.main([str(a), str(tmp_path / "out"), f"out={tmp_path / 'two'}"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "two").exists()
    assert digests(tmp_path / "out") == before


def test_never_in_place_and_never_over_a_folder(tmp_path: Path) -> None:
    a, b = pair(tmp_path, drafter={"rows": 264})
    before = digests(b)
    with pytest.raises(InputError, match="exists already"):
        mend(a, b, b)
    assert digests(b) == before


def test_what_no_repair_reaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D2: swapped ids are another vocabulary; exit 1 and nothing written."""
    a, b = pair(tmp_path, drafter={"swap": (50, 60), "rows": 264})
    assert report(a, b)["repair"] is None
    assert recipe.main([str(a), str(b), f"out={tmp_path / 'out'}"]) == 1
    assert "the vocabularies differ in 2 ids" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_dry_run_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(tmp_path, drafter={"rows": 264})
    assert recipe.main([str(a), str(b), f"out={tmp_path / 'out'}", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["needed"]
    assert plan["rows"] == [264, 272]
    assert not (tmp_path / "out").exists()


def test_shards_and_the_history_of_a_drafter_are_kept(tmp_path: Path) -> None:
    a, _ = pair(tmp_path)
    small = tiny.folder(tmp_path / "small", rows=264, layers=3)
    init_drafter(resolve(str(small)), tmp_path / "one", [0, 2])
    model = load_model(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "one", max_shard_size="100KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    mend(a, tmp_path / "one", tmp_path / "out")
    new = load_model(tmp_path / "out")
    assert torch.equal(new.model.embed_tokens.weight[:264], model.model.embed_tokens.weight)
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in new.parameters())
    made = read_pair(tmp_path / "out")
    assert [step["step"] for step in made["made"]] == ["init", "repair"]
    assert made["alignment"]["aligned"]


def test_holes_in_the_ids_are_unused_rows(tmp_path: Path) -> None:
    """D4: ids 0-258 and 300: rows 259-299 are padding, 300 is a token and is kept."""
    a, b = pair(tmp_path, target={"rows": 320}, drafter={"rows": 304})
    for folder in (a, b):
        edit(folder / "tokenizer.json", high_token("<x>"))
    result = mend(a, b, tmp_path / "out", quiet_padding=True)
    assert result["initialised"] == []
    (old,), (new,) = vocabulary(b).values(), vocabulary(tmp_path / "out").values()
    real = [*range(REAL), 300]
    assert torch.equal(new[real], old[real])
    padding = sorted(set(range(320)) - set(real))
    assert torch.equal(new[padding], mean_row(old, real).expand(len(padding), -1))


def test_the_plan_of_an_aligned_pair_is_empty(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    plan = plan_repair(resolve(str(a)), resolve(str(b)))
    assert not plan["needed"]
    assert plan["blocks"] == []
    assert plan["mends"] == []


def test_a_target_that_names_no_ids_in_its_configs(tmp_path: Path) -> None:
    """D3: the drafter's own ids don't stay behind, so that a second run has nothing to do."""
    a, b = pair(tmp_path, drafter={"rows": 264})
    (a / "generation_config.json").unlink()
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        edit(a / "config.json", lambda v, key=key: v.pop(key))  # type: ignore[misc]
    edit(b / "config.json", lambda v: v.update(eos_token_id=5))
    write_json(b / "generation_config.json", {"eos_token_id": 5})
    mend(a, b, tmp_path / "out")
    assert "eos_token_id" not in read_json(tmp_path / "out" / "config.json")
    assert read_json(tmp_path / "out" / "generation_config.json") == {}
    assert not mend(a, tmp_path / "out", tmp_path / "two")["needed"]


def test_assisted_generation_with_a_repaired_drafter(tmp_path: Path) -> None:
    """D1: refused before, the target's own text after, and no draft beyond the real ids."""
    a, b = pair(tmp_path, drafter={"rows": 264})
    target, ids = load_model(a), torch.arange(3, 20)[None]
    with pytest.raises(ValueError, match="different tokenizers"):
        target.generate(ids, assistant_model=load_model(b), max_new_tokens=8, do_sample=False)
    mend(a, b, tmp_path / "out")
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    helped = target.generate(ids, assistant_model=load_model(tmp_path / "out"), max_new_tokens=24, do_sample=False)
    assert torch.equal(plain, helped)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_drafter_of_parallel_drafting_stays_one(tmp_path: Path, quiet: bool) -> None:
    """Its mask is a padding row of an untied model: what the embedding learnt there is kept, in the head it never wins."""
    a, b = pair(tmp_path, drafter={"rows": 264, "tied": False})
    said = {"num_speculative_tokens": 6, "mask_id": 260, "mask_token": None}
    write_json(b / "pair.json", new_pair(resolve(str(a)), {"step": "init"}) | {"parallel_drafting": said})
    edit(b / "config.json", lambda v: v.update(pard_token=260))
    mend(a, b, tmp_path / "out", quiet_padding=quiet)
    assert read_pair(tmp_path / "out")["parallel_drafting"] == said
    assert mask_id_of(read_json(tmp_path / "out" / "config.json")) == 260
    old, new = vocabulary(b), vocabulary(tmp_path / "out")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert torch.equal(new[embedding][260], old[embedding][260])
    settled = mean_row(old[head], range(REAL))
    assert torch.equal(new[head][260], settled) == quiet
    assert torch.equal(new[head][263], settled) == quiet
    assert not mend(a, tmp_path / "out", tmp_path / "again", quiet_padding=quiet)["needed"]


def test_a_mask_that_would_be_lost_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut off with the rows, or taken by a token of the target's."""
    a, b = pair(tmp_path, drafter={"rows": 288})
    edit(b / "config.json", lambda v: v.update(pard_token=280))
    assert recipe.main([str(a), str(b), f"out={tmp_path / 'out'}"]) == 1
    assert "the drafter's mask id 280 lies past the target's 272 rows" in capsys.readouterr().out
    c, d = pair(tmp_path / "two", target={"rows": 304}, drafter={"rows": 312})
    edit(c / "tokenizer.json", high_token("ab"))
    edit(d / "config.json", lambda v: v.update(pard_token=300))
    assert recipe.main([str(c), str(d), f"out={tmp_path / 'out'}"]) == 1
    assert "the drafter's mask id 300 is the target's token 'ab'" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_other_merges_are_mended(tmp_path: Path) -> None:
    """D2's kind: equal ids, other cuts. The target's tokenizer comes in, and no row moves."""
    a, b = pair(tmp_path)
    for folder in (a, b):
        edit(folder / "tokenizer.json", lambda v: v["model"]["vocab"].update(th=259, he=260))
    edit(a / "tokenizer.json", lambda v: v["model"].update(merges=[["t", "h"], ["h", "e"]]))
    edit(b / "tokenizer.json", lambda v: v["model"].update(merges=[["h", "e"], ["t", "h"]]))
    assert load_tokenizer(a)("the")["input_ids"] != load_tokenizer(b)("the")["input_ids"]
    mend(a, b, tmp_path / "out")
    assert report(a, tmp_path / "out")["verdict"] == "aligned"
    assert load_tokenizer(tmp_path / "out")("the")["input_ids"] == load_tokenizer(a)("the")["input_ids"]
    (old,), (new,) = vocabulary(b).values(), vocabulary(tmp_path / "out").values()
    assert torch.equal(new, old)
    assert read_pair(tmp_path / "out")["needs_training"] == []
    assert not mend(a, tmp_path / "out", tmp_path / "again")["needed"]
