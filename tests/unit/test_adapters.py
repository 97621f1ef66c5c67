"""LoRA and QLoRA on a drafter: what the loop sees, what learns, what is written and what comes back (D16, D17)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distill.adapters import attach, check_reload, drift, load_in_4bit, merged
from distill.batches import Batch
from distill.head import Head, head_loss
from distill.losses import Signal
from distill.student import require_plain_head, supervised_hidden
from pairing.errors import InputError, PartFailedError
from pairing.source import load_model
from tests import tiny

IDS = torch.randint(3, tiny.REAL_TOKENS, (3, 24), generator=torch.Generator().manual_seed(7))


def stirred(model: Any, **kwargs: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Attaches adapters and sets every one of them, to the same values each time, as training would move them."""
    params = attach(model, **({"rank": 4, "alpha": 8} | kwargs))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, p in params:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return params


def batch(shared: int = 6) -> Batch:
    """Three rows that share their first `shared` ids; every later position is supervised."""
    ids = IDS.clone()
    ids[:, :shared] = ids[0, :shared]
    rows, columns = (x.reshape(-1) for x in torch.meshgrid(torch.arange(3), torch.arange(shared, 24), indexing="ij"))
    one = torch.zeros(len(rows), 1)  # the target is certain of its answer
    signal = Signal(
        answer_N=ids[rows, columns], head_ids_NK=ids[rows, columns][:, None], head_logp_NK=one, tail_N=one[:, 0]
    )
    return Batch(ids=["a", "b", "c"], input_BL=ids, shared=shared, row_N=rows, column_N=columns, signal=signal)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [True, False])
def test_the_loop_sees_the_adapters_as_the_models_own_forward_does(tied: bool, vocabulary: bool) -> None:
    model = tiny.model(tied=tied)
    before = logits(model)
    params = attach(model, rank=4, alpha=8, vocabulary=vocabulary)
    assert torch.equal(logits(model), before)  # adapters begin as no change
    assert len(params) == 2 * 7 * 2 + vocabulary * (2 if tied else 4)
    assert {p for _, p in params} == {p for p in model.parameters() if p.requires_grad}
    model = tiny.model(tied=tied)
    params = stirred(model, vocabulary=vocabulary)
    some = batch()
    hidden_NH = supervised_hidden(model, some)
    ours_NV = hidden_NH @ model.get_output_embeddings().weight.T
    theirs_NV = model(input_ids=some.input_BL).logits[some.row_N, some.column_N]
    assert not torch.allclose(theirs_NV, before[some.row_N, some.column_N], atol=0.1)
    torch.testing.assert_close(ours_NV, theirs_NV, rtol=1e-4, atol=1e-4)
    require_plain_head(model, some)
    gradients = []
    chunked, _ = head_loss(
        hidden_NH, model.get_output_embeddings().weight, some.signal, {"cross_entropy": 1.0}, Head(tiny.ROWS, 16)
    )
    whole = torch.nn.functional.cross_entropy(theirs_NV, some.signal.answer_N, reduction="sum")
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)
    for loss in (chunked, whole):
        model.zero_grad()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in params if p.grad is not None})
    assert gradients[0].keys() == {name for name, _ in params}
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-3)


def test_without_our_head_an_adapter_on_it_would_be_ignored() -> None:
    """Why the head is not PEFT's layer: its `weight` is the base's alone, and `require_plain_head` sees that."""
    from peft import LoraConfig, get_peft_model

    model = tiny.model(tied=False)
    get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    with pytest.raises(InputError, match="changes its logits after the head"):
        require_plain_head(model, batch())


def test_a_tied_pair_learns_as_one() -> None:
    """One optimizer step on the tied pair: both sides show the same matrix, and it is one parameter to AdamW."""
    model = tiny.model()
    params = stirred(model, vocabulary=True)
    optimizer = torch.optim.AdamW([p for _, p in params], lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    embedded_VH = model.get_input_embeddings()(torch.arange(tiny.ROWS))
    torch.testing.assert_close(model.get_output_embeddings().weight, embedded_VH)
    assert len({p.data_ptr() for _, p in params}) == len(params)


def test_all_ranks_begin_alike() -> None:
    """Ranks differ in their generators, and adapters begin at random: they come from the seed alone."""
    found = []
    for rank in (0, 1):
        model = tiny.model(layers=1, tied=False)
        torch.manual_seed(rank)
        found.append(attach(model, rank=2, alpha=8, vocabulary=True, seed=5))
        state = torch.get_rng_state()
        torch.manual_seed(rank)
        assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(*found, strict=True))
    other = attach(tiny.model(layers=1, tied=False), rank=2, alpha=8, vocabulary=True, seed=6)
    assert sum(not torch.equal(p, q) for (_, p), (_, q) in zip(found[0], other, strict=True)) == 7 + 2


def test_padding_rows_stay_as_they_were() -> None:
    """No id of a padding row is read or drafted, so its row gets no gradient and no delta."""
    model = tiny.model()
    params = attach(model, rank=4, alpha=8, vocabulary=True)
    optimizer = torch.optim.AdamW([p for _, p in params], lr=1e-2)
    before = model.get_output_embeddings().weight.detach().clone()
    some = batch()
    for _ in range(2):
        optimizer.zero_grad()
        weight_VH = model.get_output_embeddings().weight
        hidden_NH = supervised_hidden(model, some)
        head_loss(hidden_NH, weight_VH, some.signal, {"cross_entropy": 1.0}, Head(tiny.REAL_TOKENS, 16))[0].backward()
        optimizer.step()
    after = model.get_output_embeddings().weight
    assert torch.equal(after[tiny.REAL_TOKENS :], before[tiny.REAL_TOKENS :])
    assert not torch.equal(after[: tiny.REAL_TOKENS], before[: tiny.REAL_TOKENS])


def test_refusals(tmp_path: Path) -> None:
    model = tiny.model(layers=1)
    with pytest.raises(InputError, match="rank=0"):
        attach(model, rank=0, alpha=8)
    attach(model, rank=2, alpha=8)
    with pytest.raises(InputError, match="adapters already"):
        attach(model, rank=2, alpha=8)
    base, other = tiny.folder(tmp_path / "base", layers=1, seed=1), tiny.folder(tmp_path / "rows", layers=1, rows=288)
    with pytest.raises(InputError, match=r"rows: not the base .* differs in shape"):
        merged(model, other)
    with pytest.raises(InputError, match=r"base: not the base .* has other values"):
        merged(model, base)
    load_in_4bit(base).save_pretrained(tmp_path / "nf4")
    for refuse in (load_in_4bit, lambda folder: merged(model, folder)):
        with pytest.raises(InputError, match="nf4: quantized"):
            refuse(tmp_path / "nf4")


ELSEWHERE = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    logits = model(input_ids=torch.tensor(eval(sys.argv[2]))).logits
save_file({"logits": logits, "tied": torch.tensor(model.lm_head.weight is model.model.embed_tokens.weight)}, sys.argv[3])
"""


@pytest.mark.parametrize("tied", [True, False])
def test_two_added_tokens_lora_on_embedding_and_head_merge_save_reload_elsewhere(tmp_path: Path, tied: bool) -> None:
    """D16."""
    model, tokenizer = tiny.model(rows=tiny.REAL_TOKENS, tied=tied), tiny.tokenizer()
    tokenizer.add_tokens(["<|tool|>", "<|end_tool|>"], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    rows = tiny.REAL_TOKENS + 2
    model.save_pretrained(tmp_path / "base")
    trained = load_model(tmp_path / "base")
    stirred(trained, vocabulary=True)
    plain = merged(trained, tmp_path / "base")
    plain.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(plain), logits(trained), rtol=1e-4, atol=1e-4)
    assert check_reload(tmp_path / "out", plain)["largest_logit_difference"] <= 1e-3
    config, tensors = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (rows, tied)
    assert ("lm_head.weight" in tensors) != tied
    assert tensors["model.embed_tokens.weight"].shape[0] == rows
    if tied:  # in another process, as whoever gets the folder would load it
        (tmp_path / "elsewhere").mkdir()
        command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "out"), str(IDS.tolist()), "logits.safetensors"]
        subprocess.run(command, cwd=tmp_path / "elsewhere", check=True, capture_output=True, timeout=120)
        found = load_file(tmp_path / "elsewhere/logits.safetensors")
        assert bool(found["tied"])
        torch.testing.assert_close(found["logits"], logits(trained), rtol=1e-4, atol=1e-4)


def test_old_row_count_is_no_base(tmp_path: Path) -> None:
    """D16: the model grew by two tokens after its base was written; a merge into the old rows is refused."""
    tiny.folder(tmp_path / "base", rows=tiny.REAL_TOKENS)
    model = load_model(tmp_path / "base")
    model.resize_token_embeddings(tiny.REAL_TOKENS + 2)
    stirred(model, vocabulary=True)
    with pytest.raises(InputError, match=r"differs in shape \(\[261, 64\] against \[259, 64\]\)"):
        merged(model, tmp_path / "base")


def test_the_bases_own_type(tmp_path: Path) -> None:
    """A bfloat16 base trained in float32 gets its sum in float32, rounded once."""
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    stirred(model)
    plain = merged(model, tmp_path / "base")
    layer = model.model.layers[1].mlp.up_proj
    exact = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(plain.model.layers[1].mlp.up_proj.weight, exact.to(torch.bfloat16))
    plain.save_pretrained(tmp_path / "out")
    check_reload(tmp_path / "out", plain)


def damage(folder: Path, **tensors: torch.Tensor | None) -> None:
    old = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        old.pop(name, None)
        if tensor is not None:
            old[name] = tensor
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_what_a_reload_can_show(tmp_path: Path) -> None:
    """D16, kind by kind: each fault is put into a folder that was right."""

    def refused(match: str, tied: bool = True) -> None:
        with pytest.raises(PartFailedError, match=match) as e:
            check_reload(tmp_path / str(tied), models[tied])
        assert "\n" not in str(e.value)
        models[tied].save_pretrained(tmp_path / str(tied))
        check_reload(tmp_path / str(tied), models[tied])

    models = {tied: tiny.model(layers=1, tied=tied) for tied in (True, False)}
    for tied, model in models.items():
        model.save_pretrained(tmp_path / str(tied))
    one, two = tmp_path / "True", tmp_path / "False"
    configure(two, tie_word_embeddings=True)
    refused("tie_word_embeddings is True, which the model is not", tied=False)
    damage(two, **{"lm_head.weight": None})
    refused("tie_word_embeddings is False and no head", tied=False)
    damage(one, **{"lm_head.weight": torch.zeros(tiny.ROWS, 64)})
    refused("tie_word_embeddings is True and lm_head.weight differs")
    with safe_open(one / "model.safetensors", framework="pt") as f:
        norm = f.get_tensor("model.norm.weight")
    damage(one, **{"model.norm.weight": norm + 0.001})
    refused("model.norm.weight is another one after reload")
    damage(two, **{"lm_head.weight": models[False].lm_head.weight.detach() + 0.001})
    refused("lm_head.weight is another one", tied=False)


def test_qlora(tmp_path: Path) -> None:
    """Adapters learn on a 4-bit base on this machine's processor; the loop sees what the model's own forward gives."""
    model = load_in_4bit(tiny.folder(tmp_path / "base"))
    packed = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(packed) == 14
    params = stirred(model, vocabulary=True)
    assert {p.dtype for _, p in params} == {torch.float32}
    some = batch()
    ours_NV = supervised_hidden(model, some) @ model.get_output_embeddings().weight.T
    with torch.no_grad():
        theirs_NV = model(input_ids=some.input_BL).logits[some.row_N, some.column_N]
    torch.testing.assert_close(ours_NV, theirs_NV, rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.AdamW([p for _, p in params], lr=5e-3)
    losses = []
    for _ in range(8):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for _, p in params)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters() if p.dtype == torch.uint8}
    assert all(torch.equal(after[name], p) for name, p in packed.items())


def test_evaluation_does_not_cost_the_gradient_through_a_4_bit_base(tmp_path: Path) -> None:
    """Where a processor has a 4-bit kernel without a backward pass, a forward pass without gradients must not leave the
    layers to it: gradients are those of the same model with its 4-bit weights written out."""
    import bitsandbytes as bnb

    four, plain = load_in_4bit(tiny.folder(tmp_path / "base")), load_model(tmp_path / "base")
    with torch.no_grad():
        for name, p in four.named_parameters():
            if p.dtype == torch.uint8:
                plain.get_parameter(name).copy_(bnb.functional.dequantize_4bit(p.data, p.quant_state))
    gradients = []
    for model in (four, plain):
        params = stirred(model, vocabulary=True)
        model.eval()
        logits(model)
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in params})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5)


def test_qlora_is_merged_into_the_unquantized_base(tmp_path: Path) -> None:
    """D17: the sum is the base's own weight plus the delta, bit by bit; what that changes is measured."""
    import bitsandbytes as bnb

    base = tiny.folder(tmp_path / "base")
    model = load_in_4bit(base)
    stirred(model, vocabulary=True)
    plain = merged(model, base)
    name = "model.layers.1.mlp.up_proj"
    layer, before = model.get_submodule(name), load_file(base / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(plain.get_submodule(name).weight, before + layer.get_delta_weight("default"))
    rounded = bnb.functional.dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state)
    assert not torch.allclose(rounded, before, atol=0.01)  # the merge that was not made
    texts = [row.tolist() for row in IDS]
    found = drift(model, plain, texts)
    p, q = logits(model).log_softmax(-1), logits(plain).log_softmax(-1)
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert found["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert found["positions"] == IDS.numel()
    assert found["kl"] > 1e-3
    assert drift(plain, plain, texts) == {"kl": 0.0, "top1": 1.0, "positions": IDS.numel()}
    cut = drift(model, plain, texts, real=tiny.REAL_TOKENS)
    assert 0 < cut["kl"] != found["kl"]
    with pytest.raises(InputError, match="no text"):
        drift(model, plain, [[]])
