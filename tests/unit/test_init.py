"""A drafter cut from its target: equal logits with all layers, refusals before any work, a folder that says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pairing.errors import InputError
from pairing.files import read_json, write_json
from pairing.init import init_drafter, plan_init, spaced
from pairing.pair import read_pair
from pairing.source import digests, load_model, load_tokenizer, resolve
from recipes import init as recipe
from tests import architectures, tiny

IDS = torch.arange(3, 40)[None]
SHAPE = {
    "vocab_size": tiny.ROWS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def saved(model: PreTrainedModel, path: Path, **config: Any) -> Path:
    model.float().eval().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    write_json(path / "config.json", read_json(path / "config.json") | config)
    return path


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load_model(folder)(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_all_layers_give_the_targets_logits(tmp_path: Path, tied: bool) -> None:
    target = tiny.folder(tmp_path / "target", layers=3, tied=tied)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 1, 2])
    assert torch.equal(logits(tmp_path / "drafter"), logits(target))
    assert read_json(tmp_path / "drafter" / "config.json")["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(tmp_path / "drafter" / "model.safetensors")) is not tied


@pytest.mark.parametrize("kind", architectures.CLASSES)
def test_every_architecture_in_shards(tmp_path: Path, kind: str) -> None:
    architectures.model(kind, layers=3).save_pretrained(tmp_path / "target", max_shard_size="100KB")
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    init_drafter(resolve(str(tmp_path / "target")), tmp_path / "drafter", [0, 1, 2])
    assert torch.equal(logits(tmp_path / "drafter"), logits(tmp_path / "target"))


def test_chosen_layers_are_the_targets_own_renumbered(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target", layers=5)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 3])
    old, new = load_model(target), load_model(tmp_path / "drafter")
    assert new.config.num_hidden_layers == 2
    for mine, theirs in ((0, 0), (1, 3)):
        for name, tensor in old.model.layers[theirs].state_dict().items():
            assert torch.equal(new.model.layers[mine].state_dict()[name], tensor), name
    assert torch.equal(new.model.norm.weight, old.model.norm.weight)


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    """D3: the drafter ends where the target ends."""
    target = tiny.folder(tmp_path / "target")
    write_json(target / "generation_config.json", {"eos_token_id": [2, 0], "bos_token_id": 1})
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0])
    a, b = digests(target), digests(tmp_path / "drafter")
    assert (a["tokenizer"], a["template"]) == (b["tokenizer"], b["template"])
    assert read_json(tmp_path / "drafter" / "generation_config.json")["eos_token_id"] == [2, 0]
    talk = [{"role": "user", "content": "hello"}]
    assert load_tokenizer(tmp_path / "drafter").apply_chat_template(talk, tokenize=False).startswith("<|im_start|>user")


def test_a_target_without_generation_config_gets_one(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target")
    (target / "generation_config.json").unlink()
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0])
    ids = read_json(tmp_path / "drafter" / "generation_config.json")
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_cast(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target")
    result = init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 1], dtype="bfloat16")
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert result["bytes"] == sum(t.nbytes for t in weights.values())
    assert result["parameters"] == sum(t.numel() for t in weights.values())
    assert read_json(tmp_path / "drafter" / "config.json")["dtype"] == "bfloat16"


def test_pair_and_card_say_where_it_came_from(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target", layers=3)
    init_drafter(resolve(str(target)), tmp_path / "drafter", [0, 2])
    pair = read_pair(tmp_path / "drafter")
    assert pair["target"]["digests"] == digests(target)
    assert pair["made"][0] | {"layers": [0, 2], "of": 3, "step": "init"} == pair["made"][0]
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "# drafter" in card
    assert "layers [0, 2]" in card
    assert pair["target"]["digests"]["weights"] in card


@pytest.mark.parametrize("layers", [[], [0, 3], [-1, 0], [1, 0], [1, 1]])
def test_layers_out_of_range_or_order(tmp_path: Path, layers: list[int]) -> None:
    target = tiny.folder(tmp_path / "target", layers=3)
    with pytest.raises(InputError, match="ascending, different numbers from 0 to 2"):
        init_drafter(resolve(str(target)), tmp_path / "drafter", layers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]  # nothing half-written


def test_spaced() -> None:
    assert spaced(5, 30) == [0, 7, 14, 22, 29]
    assert spaced(2, 9) == [0, 8]
    assert spaced(3, 3) == [0, 1, 2]
    with pytest.raises(InputError, match="2 to 4"):
        spaced(5, 4)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    target = saved(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=272)), tmp_path / "target")
    write_json(target / "config.json", read_json(target / "config.json") | {"num_hidden_layers": 2})
    with pytest.raises(InputError, match="GPT2LMHeadModel"):
        plan_init(resolve(str(target)), [0])


def test_mixed_layer_types_are_refused_when_chosen(tmp_path: Path) -> None:
    """D7: not after training it. One kind of the two is fine."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Qwen2Config(num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=16, **SHAPE)
    target = resolve(str(saved(Qwen2ForCausalLM(config), tmp_path / "target")))
    with pytest.raises(InputError, match="1 full_attention, 1 sliding_attention"):
        plan_init(target, [0, 1])
    init_drafter(target, tmp_path / "drafter", [1, 3])
    assert load_model(tmp_path / "drafter").config.layer_types == ["full_attention"] * 2


def test_a_pattern_of_layer_types_is_written_out(tmp_path: Path) -> None:
    """Gemma 3 counts every sixth layer as full; the drafter's layers keep the kinds that they had."""
    config = Gemma3TextConfig(num_hidden_layers=6, **SHAPE)
    path = saved(Gemma3ForCausalLM(config), tmp_path / "target")
    raw = read_json(path / "config.json")
    raw.pop("layer_types")
    write_json(path / "config.json", raw)
    with pytest.raises(InputError, match=r"full_attention: \[5\]; sliding_attention: \[0, 1, 2, 3, 4\]"):
        plan_init(resolve(str(path)), [0, 5])
    init_drafter(resolve(str(path)), tmp_path / "drafter", [5])
    assert load_model(tmp_path / "drafter").config.layer_types == ["full_attention"]


def test_a_list_as_long_as_the_model_is_deep_stays_whole(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target", layers=3)
    write_json(target / "config.json", read_json(target / "config.json") | {"eos_token_id": [2, 0, 1]})
    assert plan_init(resolve(str(target)), [0])["config"]["eos_token_id"] == [2, 0, 1]


def test_tied_flag_must_be_true_to_the_weights(tmp_path: Path) -> None:
    """D16: config says tied, the file holds another head; and config says untied, the file holds none."""
    target = tiny.folder(tmp_path / "target", tied=False)
    write_json(target / "config.json", read_json(target / "config.json") | {"tie_word_embeddings": True})
    with pytest.raises(InputError, match=r"tied to the embedding, and lm_head\.weight differs"):
        plan_init(resolve(str(target)), [0])
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" not in plan_init(resolve(str(target)), [0])["tensors"]  # the same twice: tied stays tied
    del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    write_json(target / "config.json", read_json(target / "config.json") | {"tie_word_embeddings": False})
    with pytest.raises(InputError, match="the weights hold no head"):
        plan_init(resolve(str(target)), [0])


def test_torn_weights_are_refused(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target")
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="no whole safetensors file"):
        plan_init(resolve(str(target)), [0])


def test_a_used_output_folder_is_left_alone(tmp_path: Path) -> None:
    target = tiny.folder(tmp_path / "target")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        init_drafter(resolve(str(target)), tmp_path / "drafter", [0])
    assert [p.name for p in (tmp_path / "drafter").iterdir()] == ["mine.txt"]


def test_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.folder(tmp_path / "target", layers=4)
    words = [f"target={target}", f"out={tmp_path / 'drafter'}"]
    assert recipe.main([*words, "count=2", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layers"] == [0, 3]
    assert not (tmp_path / "drafter").exists()
    assert recipe.main([*words, "layers=all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="layers or count, not both"):
        recipe.main([*words, "layers=all", "count=2"])
    with pytest.raises(InputError, match="layer: unknown key; the nearest valid one is layers"):
        recipe.main([*words, "layer=[0]"])
