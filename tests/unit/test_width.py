"""Narrower drafters: what the texts never use is what goes, in every architecture; budgets; layers of no influence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from pairing.alignment import check_pair
from pairing.errors import InputError
from pairing.files import read_json
from pairing.init import Width, chosen_width, fit_budget, init_drafter, plan_init
from pairing.source import ModelSource, load_model, resolve
from pairing.width import Importance, Shape, choose, importance, influential, narrower, shape_of, shapes_below
from tests import architectures, tiny

TEXTS = [list(range(3, 43)), list(range(100, 160)), [7, 9, 250, 33] * 6]


def target(path: Path, kind: str, dead: bool = False) -> ModelSource:
    architectures.model(kind, dead=dead).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return resolve(str(path))


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load_model(folder)(torch.tensor([TEXTS[0]])).logits


def width(source: ModelSource, **sizes: int) -> Width:
    asked = chosen_width(source, **sizes)
    assert asked is not None
    old = shape_of(read_json(source.path / "config.json"))
    return Width(asked.shape, choose(importance(load_model(source.path), TEXTS, old), old, asked.shape))


def attention_outputs(source: ModelSource) -> list[torch.Tensor]:
    """What the heads hand on, by layer: some of it must be alive."""
    return list(importance(load_model(source.path), TEXTS, shape_of(read_json(source.path / "config.json"))).heads_LQ)


@pytest.mark.parametrize("kind", architectures.CLASSES)
def test_what_the_texts_never_use_goes(tmp_path: Path, kind: str) -> None:
    """Exactly the dead channels and heads are dropped, so the narrower model computes the same."""
    source = target(tmp_path / "target", kind, dead=True)
    sizes = {"ffn": 128} if kind in architectures.COUPLED else {"ffn": 128, "heads": 4, "kv_heads": 2}
    init_drafter(source, tmp_path / "drafter", [0, 1], width=width(source, **sizes))
    config = read_json(tmp_path / "drafter" / "config.json")
    assert (config.get("intermediate_size") or config["ffn_dim"]) == 128
    assert any(weight.abs().max() > 1e-3 for weight in attention_outputs(source)), "the test would show nothing"
    torch.testing.assert_close(logits(tmp_path / "drafter"), logits(source.path), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", architectures.CLASSES)
def test_a_narrower_model_loads_and_is_aligned(tmp_path: Path, kind: str) -> None:
    source = target(tmp_path / "target", kind)
    asked = width(source, hidden=64, ffn=64, heads=4)
    result = init_drafter(source, tmp_path / "drafter", [0, 1], width=asked)
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    assert result["parameters"] == sum(t.numel() for t in weights.values())
    assert result["bytes"] == sum(t.nbytes for t in weights.values())
    model = load_model(tmp_path / "drafter")
    assert model.get_input_embeddings().weight.shape == (tiny.ROWS, 64)
    assert torch.isfinite(logits(tmp_path / "drafter")).all()
    assert check_pair(source, resolve(str(tmp_path / "drafter")))["aligned"]
    assert asked.kept is not None
    old = load_model(source.path).get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, old[:, asked.kept.hidden])


def test_heads_are_taken_whole_with_their_own_keys(tmp_path: Path) -> None:
    """8 heads over 4 groups: the drafter's rows are those of the kept heads, in their order."""
    source = target(tmp_path / "target", "llama", dead=True)
    asked = width(source, kv_heads=2)
    assert asked.kept is not None
    assert asked.kept.kv_heads == [[0, 1], [0, 1]]
    assert asked.kept.heads == [[0, 1, 2, 3], [0, 1, 2, 3]]
    init_drafter(source, tmp_path / "drafter", [1], width=asked)
    old, new = load_file(source.path / "model.safetensors"), load_file(tmp_path / "drafter" / "model.safetensors")
    for part, rows in (("q_proj", 64), ("k_proj", 32)):
        assert torch.equal(
            new[f"model.layers.0.self_attn.{part}.weight"], old[f"model.layers.1.self_attn.{part}.weight"][:rows]
        )


def test_one_head_out_of_each_group() -> None:
    found = Importance(torch.arange(4.0), torch.arange(4.0)[None], torch.tensor([[1.0, 2, 9, 3]]), torch.zeros(1), 1)
    old = Shape(4, 4, 4, 2, 2)
    kept = choose(found, old, narrower(old, "LlamaForCausalLM", 2, 1, 2))
    assert kept.hidden == [2, 3]
    assert kept.ffn == [[3]]
    assert kept.heads == [[1, 2]]
    assert kept.kv_heads == [[0, 1]]


@pytest.mark.parametrize(
    ("architecture", "sizes", "match"),
    [
        ("LlamaForCausalLM", (None, None, 9), "the target has 8"),
        ("LlamaForCausalLM", (256, None, None), "hidden=256: the target has 128"),
        ("LlamaForCausalLM", (None, None, 3), r"allow heads=\[2, 4, 6, 8\]"),
        ("OPTForCausalLM", (100, None, None), "give a multiple of 16"),
        ("Qwen2ForCausalLM", (64, None, 8), "give a multiple of 16"),
    ],
)
def test_widths_that_do_not_go(architecture: str, sizes: tuple[int | None, int | None, int | None], match: str) -> None:
    with pytest.raises(InputError, match=match):
        narrower(Shape(128, 192, 8, 4, 16), architecture, *sizes)


def test_a_layer_without_influence_goes(tmp_path: Path) -> None:
    """A layer that hands its input on: influence 0, and without it the model computes the same."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**architectures.shape(layers=4))).float().eval()
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path / "target")
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    source = resolve(str(tmp_path / "target"))
    found = importance(load_model(source.path), TEXTS, shape_of(read_json(source.path / "config.json")))
    assert found.influence_L[2].abs() < 1e-5
    assert found.influence_L.min() == found.influence_L[2]
    layers = influential(found.influence_L, 3)
    assert layers == [0, 1, 3]
    init_drafter(source, tmp_path / "drafter", layers)
    torch.testing.assert_close(logits(tmp_path / "drafter"), logits(source.path))


def test_importance_is_the_papers(tmp_path: Path) -> None:
    """Against a pass by hand: mean over tokens of |x|, then the L2 norm over texts."""
    source = target(tmp_path / "target", "llama")
    model = load_model(source.path)
    found = importance(model, TEXTS, shape_of(read_json(source.path / "config.json")))
    caught: list[torch.Tensor] = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, args: caught.append(args[0][0]))
    with torch.no_grad():
        for text in TEXTS:
            model(torch.tensor([text]))
    hook.remove()
    want = torch.stack([x.abs().mean(0) for x in caught]).norm(dim=0)
    torch.testing.assert_close(found.ffn_LF[1], want)
    assert found.tokens == sum(map(len, TEXTS))
    assert not model.model.layers[1].mlp.down_proj._forward_pre_hooks


def test_a_budget_takes_the_widest_that_fits(tmp_path: Path) -> None:
    source = target(tmp_path / "target", "llama")
    every = int(plan_init(source, [0, 1])["parameters"])
    assert fit_budget(source, every) == ([0, 1], None)
    layers, asked = fit_budget(source, every - 1)
    assert layers == [0, 1]
    assert asked is not None
    assert asked.shape == Shape(64, 128, 4, 4, 16)
    assert plan_init(source, layers, None, asked)["parameters"] <= every - 1
    with pytest.raises(InputError, match=r"have [0-9]+ already, most of them vocabulary"):
        fit_budget(source, 1000)


@pytest.mark.parametrize("heads", [(9, 3), (8, 2), (6, 6)])
def test_every_narrower_shape_is_one_that_transformers_loads(heads: tuple[int, int]) -> None:
    """9 heads in 3 groups at hidden 576 is SmolLM2-135M: hidden 256 with 3 heads looked fine and did not load."""
    old = Shape(hidden=576 if heads[0] == 9 else 768, ffn=1536, heads=heads[0], kv_heads=heads[1], head_dim=64)
    shapes = list(shapes_below(old, "LlamaForCausalLM"))
    assert len(shapes) > 2
    for shape in shapes:
        config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            num_hidden_layers=1,
            vocab_size=8,
        )
        assert config.hidden_size == shape.hidden


def test_a_hidden_size_that_heads_do_not_divide_is_refused() -> None:
    old = Shape(hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64)
    with pytest.raises(InputError, match="hidden=256, heads=3: transformers loads a LlamaForCausalLM only where"):
        narrower(old, "LlamaForCausalLM", hidden=256, heads=3)
    assert narrower(old, "LlamaForCausalLM", hidden=384, heads=3).hidden == 384
    assert narrower(old, "Qwen3ForCausalLM", hidden=256, heads=3).hidden == 256
