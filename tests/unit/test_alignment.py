"""`check`: what almost matches is told apart from what matches, and each misfit comes with its level and its fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pairing import serving
from pairing.alignment import check_pair, summary
from pairing.compare_chat import turn_end
from pairing.engine import Engine
from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter
from pairing.pair import read_pair
from pairing.preflight import preflight_report
from pairing.serving import context
from pairing.serving_plan import Serving
from pairing.source import resolve
from recipes import check as recipe
from tests import tiny

Edit = Callable[[dict[str, Any]], None]


def edit(file: Path, change: Edit) -> None:
    value = read_json(file)
    change(value)
    write_json(file, value)


def pair(
    tmp_path: Path, target: dict[str, Any] | None = None, drafter: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """Two tiny folders; kwargs as for tiny.folder."""
    a = tiny.folder(tmp_path / "target", **(target or {}))
    return a, tiny.folder(tmp_path / "drafter", **{"layers": 1, **(drafter or {})})


def report(a: Path, b: Path) -> dict[str, Any]:
    return check_pair(resolve(str(a)), resolve(str(b)))


def found(rep: dict[str, Any], where: str, level: str) -> list[dict[str, Any]]:
    return [f for f in rep["findings"] if f["where"] == where and f["level"] == level]


def test_an_init_drafter_is_aligned_without_a_warning(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 2])
    rep = report(target, tmp_path / "drafter")
    assert rep["aligned"]
    assert rep["verdict"] == "aligned"
    assert {f["level"] for f in rep["findings"]} == {"info"}
    assert rep["facts"] == {"highest_id": 258, "target_rows": 272, "drafter_rows": 272, "max_model_len": 512}


@pytest.mark.parametrize("rows", [288, 260])
def test_same_tokenizer_other_padding(tmp_path: Path, rows: int) -> None:
    """D1: said as such, and how to mend it; it is not taken for another vocabulary."""
    rep = report(*pair(tmp_path, drafter={"rows": rows}))
    assert not rep["aligned"]
    (finding,) = found(rep, "rows", "repairable")
    assert f"same tokenizer, padding differs: the target has 272 rows, the drafter {rows}" in finding["what"]
    assert ("cuts" if rows > 272 else "pads") in finding["fix"]
    assert finding["fix"].startswith(f"`draftsmith repair {rep['target']} {rep['drafter']} out=")
    assert rep["repair"] in finding["fix"]
    assert not [f for f in rep["findings"] if f["level"] == "blocks"]


def test_two_swapped_ids(tmp_path: Path) -> None:
    """D2: equal sizes, two ids exchanged."""
    rep = report(*pair(tmp_path, drafter={"swap": (50, 60)}))
    (finding,) = found(rep, "tokens", "blocks")
    tokens = tiny.tokenizer().convert_ids_to_tokens([50, 60])
    assert "differ in 2 ids (the same tokens, moved)" in finding["what"]
    assert f"id 50 is {tokens[0]!r} in the target, {tokens[1]!r} in the drafter" in finding["what"]
    assert f"id 60 is {tokens[1]!r} in the target, {tokens[0]!r} in the drafter" in finding["what"]
    assert rep["verdict"].startswith("not aligned: the vocabularies differ in 2 ids")


def test_one_id_of_another_string(tmp_path: Path) -> None:
    """D2: one string differs, everything else is equal."""
    a, b = pair(tmp_path)
    old = str(tiny.tokenizer().convert_ids_to_tokens(258))

    def rename(value: dict[str, Any]) -> None:
        vocab = value["model"]["vocab"]
        vocab["zz"] = vocab.pop(old)

    edit(b / "tokenizer.json", rename)
    (finding,) = found(report(a, b), "tokens", "blocks")
    assert "differ in 1 ids: " in finding["what"]
    assert f"id 258 is {old!r} in the target, 'zz' in the drafter" in finding["what"]


def high_token(token: str) -> Edit:
    """An added token with id 300 in a vocabulary that ends at 258."""
    added = {"id": 300, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}

    def change(value: dict[str, Any]) -> None:
        value["model"]["vocab"][token] = 300
        value["added_tokens"].append(added | {"special": False})

    return change


def test_ids_beyond_holes_and_beyond_len_are_compared(tmp_path: Path) -> None:
    """D4: ids 0-258 and 300, so that len() is 260: the difference lies at 300."""
    a, b = pair(tmp_path, target={"rows": 304}, drafter={"rows": 304})
    edit(a / "tokenizer.json", high_token("<x>"))
    edit(b / "tokenizer.json", high_token("<x>"))
    rep = report(a, b)
    assert rep["aligned"]
    assert rep["facts"]["highest_id"] == 300
    assert "260 tokens equal id by id, highest id 300, 41 holes" in found(rep, "tokens", "info")[0]["what"]

    edit(b / "tokenizer.json", lambda v: v["model"]["vocab"].pop("<x>"))
    edit(b / "tokenizer.json", lambda v: v["added_tokens"].pop())
    edit(b / "tokenizer.json", high_token("<y>"))
    (finding,) = found(report(a, b), "tokens", "blocks")
    assert "id 300 is '<x>' in the target, '<y>' in the drafter" in finding["what"]


def test_an_id_above_the_rows_blocks(tmp_path: Path) -> None:
    """D4: an added id above vocab_size has no row."""
    a, b = pair(tmp_path)
    edit(a / "tokenizer.json", high_token("<x>"))
    edit(b / "tokenizer.json", high_token("<x>"))
    whats = [f["what"] for f in found(report(a, b), "rows", "blocks")]
    assert whats == [
        "id 300 is in use and the target has 272 rows only",
        "id 300 is in use and the drafter has 272 rows only",
    ]


def test_a_drafter_without_rows_for_the_targets_ids(tmp_path: Path) -> None:
    """D4: its own tokenizer ends early, and it is fed the target's ids all the same."""
    a, b = pair(tmp_path, target={"rows": 304})
    edit(a / "tokenizer.json", high_token("<x>"))
    rep = report(a, b)
    assert not [f for f in rep["findings"] if f["level"] == "blocks"]
    assert [f["what"] for f in found(rep, "rows", "repairable")] == [
        "id 300 is in use and the drafter has 272 rows only"
    ]


def test_a_token_that_the_drafter_lacks(tmp_path: Path) -> None:
    a, b = pair(tmp_path, target={"rows": 304}, drafter={"rows": 304})
    edit(a / "tokenizer.json", high_token("<x>"))
    (finding,) = found(report(a, b), "tokens", "repairable")
    assert "lacks 1 of the target's ids: 300 '<x>'" in finding["what"]
    (finding,) = found(report(b, a), "tokens", "warns")
    assert "has 1 ids that the target's has not: 300 '<x>'" in finding["what"]


def test_rows_of_the_weights_against_the_config(tmp_path: Path) -> None:
    """D16: a drafter whose config kept the old row count."""
    a, b = pair(tmp_path)
    edit(b / "config.json", lambda v: v.update(vocab_size=288))
    whats = [f["what"] for f in found(report(a, b), "rows", "blocks")]
    assert whats == ["the drafter's embedding has 272 rows, its config says vocab_size 288"]


@pytest.mark.parametrize(("tied", "level"), [(True, "warns"), (False, "blocks")])
def test_tied_flag_against_the_file(tmp_path: Path, tied: bool, level: str) -> None:
    """D16: tied, and a head in the file; not tied, and none."""
    a, b = pair(tmp_path, drafter={"tied": not tied})
    edit(b / "config.json", lambda v: v.update(tie_word_embeddings=tied))
    (finding,) = found(report(a, b), "head", level)
    assert "drafter's config says" in finding["what"]


def test_a_quantized_head_blocks(tmp_path: Path) -> None:
    a, b = pair(tmp_path, drafter={"tied": False})
    weights = load_file(b / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].byte().reshape(-1, 1)
    save_file(weights, b / "model.safetensors", metadata={"format": "pt"})
    assert found(report(a, b), "head", "blocks")


def test_eos_as_a_list_is_the_same_set(tmp_path: Path) -> None:
    """D3 (c): eos 2 and eos [2] are one set, so the pair is usable."""
    a, b = pair(tmp_path)
    edit(a / "generation_config.json", lambda v: v.update(eos_token_id=[2]))
    rep = report(a, b)
    assert rep["aligned"]
    assert not found(rep, "special ids", "warns")


def test_other_ends_warn_and_do_not_block(tmp_path: Path) -> None:
    """D3 (b): the drafter's generation config ends elsewhere; and the target's two sources of eos disagree."""
    a, b = pair(tmp_path)
    edit(b / "generation_config.json", lambda v: v.update(eos_token_id=[2, 0]))
    rep = report(a, b)
    assert rep["aligned"]
    assert found(rep, "special ids", "warns")[0]["what"] == "eos ids are [2] in the target, [0, 2] in the drafter"
    edit(a / "generation_config.json", lambda v: v.update(eos_token_id=0))
    edit(b / "generation_config.json", lambda v: v.update(eos_token_id=0))
    (finding,) = found(report(a, b), "special ids", "warns")
    assert "the target's tokenizer ends with [2], its generation config with [0]" in finding["what"]


def test_a_template_that_ends_turns_with_no_eos(tmp_path: Path) -> None:
    """D3: the template's own end of a turn is not among the ids that stop an answer."""
    a, b = pair(tmp_path)
    assert turn_end(tiny.tokenizer()) == 2
    for folder in (a, b):
        (folder / "chat_template.jinja").write_text(tiny.CHATML.replace("<|im_end|>", "<|endoftext|>"))
    rep = report(a, b)
    assert rep["aligned"]
    (finding,) = found(rep, "special ids", "warns")
    assert "ends a turn with '<|endoftext|>' (id 0), its eos ids are [2]" in finding["what"]
    for folder in (a, b):
        write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    assert not found(report(a, b), "special ids", "warns")


def test_another_bos_flag_warns(tmp_path: Path) -> None:
    """D3 (a): one tokenizer puts a bos before every text. The pair stays usable."""
    a, b = pair(tmp_path)
    piece = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    processor = {"type": "TemplateProcessing", "single": piece, "pair": piece, "special_tokens": special}
    edit(b / "tokenizer.json", lambda v: v.update(post_processor=processor))
    rep = report(a, b)
    assert rep["aligned"]
    (finding,) = found(rep, "segmentation", "warns")
    assert "add other special tokens" in finding["what"]


def test_other_merges_with_equal_ids(tmp_path: Path) -> None:
    """D2's kind: every id has its string, and texts are cut differently."""
    a, b = pair(tmp_path)
    for folder in (a, b):
        edit(folder / "tokenizer.json", lambda v: v["model"]["vocab"].update(th=259, he=260))
    edit(a / "tokenizer.json", lambda v: v["model"].update(merges=[["t", "h"], ["h", "e"]]))
    edit(b / "tokenizer.json", lambda v: v["model"].update(merges=[["h", "e"], ["t", "h"]]))
    rep = report(a, b)
    assert not rep["aligned"]
    (finding,) = found(rep, "segmentation", "repairable")
    assert "texts are cut differently" in finding["what"]


def test_a_merge_that_no_common_text_asks_for(tmp_path: Path) -> None:
    """The token is there at the same id, and the drafter's tokenizer never makes it."""
    a, b = pair(tmp_path)
    for folder in (a, b):
        edit(folder / "tokenizer.json", lambda v: v["model"]["vocab"].update(qz=259))
    edit(a / "tokenizer.json", lambda v: v["model"].update(merges=[["q", "z"]]))
    assert "1 of 22 texts are cut differently" in found(report(a, b), "segmentation", "repairable")[0]["what"]


def test_templates_are_compared_by_what_they_render(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    (b / "chat_template.jinja").write_text(tiny.CHATML.replace("for m in messages", "for m  in  messages"))
    rep = report(a, b)
    assert not found(rep, "template", "warns")
    (b / "chat_template.jinja").write_text(tiny.CHATML.replace("assistant", "model"))
    rep = report(a, b)
    assert rep["aligned"]
    (finding,) = found(rep, "template", "warns")
    assert "'assistant" in finding["what"]
    assert "'model" in finding["what"]
    (b / "chat_template.jinja").unlink()
    assert "no chat template" in found(report(a, b), "template", "warns")[0]["what"]


def test_a_shorter_drafter_names_the_safe_length(tmp_path: Path) -> None:
    """D6: 512 against 2048 positions."""
    rep = report(*pair(tmp_path, target={"positions": 2048}, drafter={"positions": 512}))
    (finding,) = found(rep, "context", "warns")
    assert "`--max-model-len 512`" in finding["fix"]
    assert "not at 2048" in finding["fix"]
    assert rep["facts"]["max_model_len"] == 512


def test_scaled_positions() -> None:
    assert context({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}) == 400
    assert context({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 4.0}}) == 100
    assert context({}) is None


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 4}, "mixes layer types (2 full_attention, 2 sliding_attention)"),
        (
            {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            "no attention (conv)",
        ),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "no attention (linear_attention)"),
    ],
)
def test_layers_that_vllm_cannot_draft_with(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    """D7: mixed layer types, one with a convolution, one with a state space."""
    a, b = pair(tmp_path)
    write_json(
        b / "config.json", {"vocab_size": 272, "max_position_embeddings": 512, "tie_word_embeddings": True, **config}
    )
    rep = report(a, b)
    assert not rep["aligned"]
    assert what in found(rep, "layers", "blocks")[0]["what"]


def test_a_multimodal_target_warns(tmp_path: Path) -> None:
    """D8: text only is drafted; its rows and positions come from the text part of the config."""
    a, b = pair(tmp_path)
    text = read_json(a / "config.json")
    write_json(
        a / "config.json",
        {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}},
    )
    rep = report(a, b)
    assert rep["aligned"]
    assert "multimodal" in found(rep, "layers", "warns")[0]["what"]
    assert rep["facts"]["target_rows"] == 272


def test_a_4_bit_drafter_that_this_vllm_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D18: said when the pair is checked, not when the engine dies."""
    a, b = pair(tmp_path)
    edit(b / "config.json", lambda v: v.update(quantization_config={"quant_method": "bitsandbytes"}))
    monkeypatch.setattr(serving, "engine", lambda: Engine("0.32.0", "cpu", None))
    assert "pip install --no-deps vllm-bnb-plugin" in found(report(a, b), "engine", "warns")[0]["fix"]
    monkeypatch.setattr(serving, "engine", lambda: Engine("0.32.0", "cpu", "0.0.3"))
    assert not found(report(a, b), "engine", "warns")


def test_recipe_exit_codes_json_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.folder(tmp_path / "target")
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0])
    out = tmp_path / "check.json"
    assert recipe.main([str(target), str(tmp_path / "drafter"), "--json", f"out={out}", "record=true"]) == 0
    rep = json.loads(capsys.readouterr().out)
    assert read_json(out) == rep
    assert read_pair(tmp_path / "drafter")["alignment"] == summary(rep)
    assert "| aligned | True |" in (tmp_path / "drafter" / "README.md").read_text()

    other = tiny.folder(tmp_path / "other", swap=(5, 6))
    assert recipe.main([str(target), str(other)]) == 1
    assert "not aligned" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InputError, match=r"no pair\.json"):
        recipe.main([str(target), str(other), "record=true"])
    assert not (other / "pair.json").exists()
    with pytest.raises(InputError, match="draft: needs a value"):
        recipe.main([str(target)])


def test_what_each_user_needs_is_said_apart(tmp_path: Path) -> None:
    """D1, D2, D7: other rows stop all but the universal kind; other tokens too; mixed layers stop vLLM alone."""
    runs = {
        user: need["runs"] for user, need in report(*pair(tmp_path / "rows", drafter={"rows": 288}))["needs"].items()
    }
    assert runs == {"vllm": False, "transformers": False, "universal": True, "training": False}
    rep = report(*pair(tmp_path / "swap", drafter={"swap": (50, 60)}))
    assert {u: n["runs"] for u, n in rep["needs"].items()} == dict.fromkeys(rep["needs"], False)
    assert "refuses two tokenizers" in rep["needs"]["universal"]["because"][0]
    a, b = pair(tmp_path / "layers")
    gemma = {"model_type": "gemma2", "num_hidden_layers": 4, "vocab_size": 272, "tie_word_embeddings": True}
    write_json(b / "config.json", gemma | {"max_position_embeddings": 512})
    runs = {user: need["runs"] for user, need in report(a, b)["needs"].items()}
    assert runs == {"vllm": False, "transformers": True, "universal": False, "training": True}
    write_json(b / "config.json", gemma | {"model_type": "mamba", "num_hidden_layers": 2})
    assert not report(a, b)["needs"]["transformers"]["runs"]
    turned = report(b, a)  # the other way round: the target keeps a state
    assert [turned["needs"][user]["runs"] for user in ("transformers", "training")] == [False, True]
    assert "keeps a state" in turned["needs"]["transformers"]["because"][0]
    assert "no attention (linear_attention)" in found(turned, "layers", "warns")[0]["what"]


def test_transformers_agrees_about_two_tokenizers(tmp_path: Path) -> None:
    """What `needs` says of assisted generation is what transformers does."""
    import torch

    from pairing.source import load_model, load_tokenizer

    a, b = pair(tmp_path, drafter={"rows": 288})
    ids, tok = torch.arange(3, 10)[None], load_tokenizer(a)
    target, other, same = load_model(a), load_model(b), load_model(tiny.folder(tmp_path / "same", layers=1))
    both = {"tokenizer": tok, "assistant_tokenizer": tok}
    plain = target.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(target.generate(ids, assistant_model=same, max_new_tokens=4, do_sample=False), plain)
    with pytest.raises(ValueError, match="different tokenizers"):
        target.generate(ids, assistant_model=other, max_new_tokens=4)
    with pytest.raises(ValueError, match="omit `assistant_tokenizer`"):
        target.generate(ids, assistant_model=same, max_new_tokens=4, **both)


def test_rotary_scaling_as_served(tmp_path: Path) -> None:
    """D6: an override lengthens the target; it does not reach the drafter."""
    a, b = pair(tmp_path)
    rep = check_pair(
        resolve(str(a)), resolve(str(b)), hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    )
    whats = [f["what"] for f in found(rep, "context", "warns")]
    assert whats[0] == "the drafter takes 512 positions, the target 2048"
    assert "linear by 4.0 in the target, none in the drafter; --hf-overrides reaches the target only" in whats[1]
    assert rep["facts"]["max_model_len"] == 512
    assert not found(report(a, b), "context", "warns")


def test_a_sliding_window_of_the_drafter(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    edit(b / "config.json", lambda v: v.update(model_type="mistral", sliding_window=128))
    (finding,) = found(report(a, b), "context", "warns")
    assert "attends to the last 128 tokens only, the target to all" in finding["what"]
    edit(b / "config.json", lambda v: v.update(sliding_window=None))
    assert not found(report(a, b), "context", "warns")


@pytest.mark.parametrize(
    ("n", "config", "what"),
    [
        (1, {}, None),
        (2, {}, None),
        (4, {}, "2 attention heads"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 2}, "2 key/value heads"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3}, "320 vocabulary rows (padded to 64)"),
        (2, {"intermediate_size": 129}, "129 FFN channels"),
        (2, {"quantization_config": {"quant_method": "bitsandbytes"}}, "32 over 2 are no multiples"),
        (2, {"quantization_config": {"quant_method": "bitsandbytes"}}, "does not split over devices"),
    ],
)
def test_shards(n: int, config: dict[str, Any], what: str | None) -> None:
    base = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 126 * 64, "hidden_size": 64}
    if config.get("quantization_config"):
        config = config | {"intermediate_size": 64}
        what = what.replace("32 over 2", "64 and 64 over 2") if what else what
    findings = serving.shard_findings(base | {"vocab_size": 272} | config, "drafter", n)
    assert [what in f.what for f in findings if what] == ([True] if what else [])
    assert bool(findings) is bool(what)


def test_markdown_for_github(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table row a finding, whatever the tokens are; the line that serves stands in a code block."""
    a, b = pair(tmp_path, drafter={"swap": (0, 130)})
    assert recipe.main([str(a), str(b), "--markdown", "num_speculative_tokens=3"]) == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("### not aligned")
    assert r"&lt;\|endoftext\|>" in out
    rows = [line for line in lines if line.startswith("| blocks ")]
    assert rows
    assert all(line.replace(r"\|", "").count("|") == 5 for line in rows)
    assert '"num_speculative_tokens": 3' in lines[lines.index("```sh") + 1]


def test_preflight_is_shown_and_counts_only_where_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D9 in `check`: the wrong key is refused with the right name."""
    target = tiny.folder(tmp_path / "target")
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0])
    words = [str(target), str(tmp_path / "drafter"), "speculative_config={tensor_parallel_size: 1}", "--json"]
    assert recipe.main(words) == 0
    flight = json.loads(capsys.readouterr().out)["preflight"]
    assert not flight["starts"]
    assert "draft_tensor_parallel_size" in flight["findings"][0]["fix"]
    assert recipe.main([*words, "preflight=require"]) == 1
    capsys.readouterr()
    assert recipe.main([*words, "preflight=skip"]) == 0
    assert json.loads(capsys.readouterr().out)["preflight"] is None


def test_the_report_is_what_docs_describe(tmp_path: Path) -> None:
    from tests.conftest import ROOT

    a, b = pair(tmp_path)
    edit(b / "config.json", lambda v: v.update(pard_token=2))
    out = tmp_path / "check.json"
    recipe.run(recipe.CheckConfig(target=str(a), draft=str(b), out=out))
    rep = read_json(out)
    text = (ROOT / "docs" / "check.md").read_text()
    keys = [
        *rep,
        *rep["facts"],
        *rep["needs"],
        *rep["findings"][0],
        *rep["preflight"],
        *(rep["preflight"]["numbers"] or {}),
    ]
    assert [k for k in keys if f"`{k}`" not in text] == []
    unmasked = Serving(speculative_config={"parallel_drafting": True})
    mask_free = preflight_report(resolve(str(a)), resolve(str(a)), unmasked)["findings"]
    for findings, begins in (
        (rep["findings"], "`where` is one of"),
        (mask_free, "| `findings` | as above; `where` is"),
    ):
        named = text.split(begins)[1].split(".\n")[0].split("|\n")[0]
        where = {f["where"] for f in findings}
        assert where & {"mask token", "parallel drafting"}
        assert {w for w in where if f"`{w}`" not in named} == set()
