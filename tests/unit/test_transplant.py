"""A donor of another vocabulary: what is copied, what is composed, special tokens by role, the target's rows exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pairing.alignment import check_pair, tokens_by_id
from pairing.errors import InputError
from pairing.files import read_json, read_jsonl
from pairing.pair import read_pair
from pairing.rows import Row, mean_row, row_sources
from pairing.source import load_model, load_tokenizer, resolve
from pairing.transplant import transplant
from tests import tiny
from tests.unit.test_alignment import edit


def sentencepiece(path: Path, words: list[str], **special: str) -> Path:
    """A donor whose tokenizer writes spaces as '▁' and bytes as '<0x..>', as Llama-2's does."""
    order = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefghij", *words]
    vocab = {token: i for i, token in enumerate(order)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tiny.model(layers=1, rows=len(order) + 5, seed=3, tied=False).save_pretrained(path)
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | special
    PreTrainedTokenizerFast(tokenizer_object=raw, **roles).save_pretrained(path)
    return path


def rows_of(path: Path) -> dict[str, torch.Tensor]:
    weights = load_file(path / "model.safetensors")
    return {k: weights[k] for k in ("model.embed_tokens.weight", "lm_head.weight")}


def with_words(path: Path, *words: str, **kwargs: Any) -> Path:
    """The tiny target with more byte-level tokens, from id 259 on."""
    folder = tiny.folder(path, **kwargs)
    edit(folder / "tokenizer.json", lambda v: v["model"]["vocab"].update({w: 259 + i for i, w in enumerate(words)}))
    return folder


def test_a_donor_of_another_family(tmp_path: Path) -> None:
    """Bytes and words are found whatever each tokenizer calls them; the rest is composed, in embedding and head."""
    target = with_words(tmp_path / "target", "Ġabc", "abd", "Ġé")
    donor = sentencepiece(tmp_path / "donor", ["▁abc", "ab"])
    result = transplant(resolve(str(target)), resolve(str(donor)), tmp_path / "out")
    t, d = load_tokenizer(target), load_tokenizer(donor)
    sources = {row["token"]: row for row in read_jsonl(tmp_path / "out" / "row_sources.jsonl")}
    assert len(sources) == len(tokens_by_id(t)) == result["tokens"] == 262
    assert result["parameters"] == sum(p.numel() for p in load_model(tmp_path / "out").parameters())
    assert sources["Ġabc"] == {"id": 259, "token": "Ġabc", "how": "copied", "of": ["▁abc"]}
    assert sources["abd"]["of"] == ["ab", "d"]
    assert sources["Ġé"] == {"id": 261, "token": "Ġé", "how": "pieces", "of": ["▁", "<0xE9>"]}
    assert sources["z"]["of"] == ["<0x7A>"]
    assert sources["Ġ"]["of"] == ["▁"]
    for name, new in rows_of(tmp_path / "out").items():
        old = rows_of(donor)[name]
        assert new.shape == (272, 64)
        assert torch.equal(new[259], old[d.convert_tokens_to_ids("▁abc")])
        assert torch.equal(new[260], old[d.convert_tokens_to_ids(["ab", "d"])].mean(0))
        assert torch.equal(new[262:], mean_row(old, tokens_by_id(d)).expand(10, -1))


def test_special_tokens_by_role(tmp_path: Path) -> None:
    """D5: a role token that the donor lacks, pad id = eos id, rows = the target's config."""
    target = tiny.folder(tmp_path / "target", rows=320)
    edit(target / "tokenizer_config.json", lambda v: v.update(pad_token="<|im_end|>", bos_token=None))
    donor = sentencepiece(tmp_path / "donor", [])
    result = transplant(resolve(str(target)), resolve(str(donor)), tmp_path / "out")
    special = {row["token"]: (row["how"], row["of"]) for row in result["special"]}
    assert special == {
        "<|endoftext|>": ("mean", []),  # never cut into '<', '|', …
        "<|im_start|>": ("mean", []),
        "<|im_end|>": ("role", ["</s>"]),  # eos, although it is the pad too
    }
    assert rows_of(tmp_path / "out")["lm_head.weight"].shape[0] == 320
    assert read_json(tmp_path / "out" / "config.json")["vocab_size"] == 320
    for name, new in rows_of(tmp_path / "out").items():
        assert torch.equal(new[2], rows_of(donor)[name][2])
        assert torch.equal(new[1], mean_row(rows_of(donor)[name], tokens_by_id(load_tokenizer(donor))))


def test_the_user_has_the_last_word(tmp_path: Path) -> None:
    """D5: overrides go before role and string; a token that is not there is named."""
    target, donor = resolve(str(tiny.folder(tmp_path / "target"))), resolve(str(sentencepiece(tmp_path / "donor", [])))
    mapping = {"<|im_start|>": "</s>", "<|im_end|>": "<s>"}
    result = transplant(target, donor, tmp_path / "out", mapping)
    special = {row["token"]: (row["how"], row["of"]) for row in result["special"]}
    assert special["<|im_start|>"] == ("user", ["</s>"])
    assert special["<|im_end|>"] == ("user", ["<s>"])
    assert read_pair(tmp_path / "out")["made"][0]["mapping"] == mapping
    with pytest.raises(InputError, match=r"the donor's tokenizer has no token '<nope>'"):
        transplant(target, donor, tmp_path / "two", {"<|im_end|>": "<nope>"})
    with pytest.raises(InputError, match=r"the target's tokenizer has no token '<nope>'"):
        transplant(target, donor, tmp_path / "two", {"<nope>": "<s>"})
    assert not (tmp_path / "two").exists()


def test_a_smaller_model_of_the_family(tmp_path: Path) -> None:
    """The same vocabulary under other padding: every row is copied, none needs training, logits are the donor's."""
    target, donor = (
        tiny.folder(tmp_path / "target", layers=3),
        tiny.folder(tmp_path / "donor", layers=1, rows=264, seed=5),
    )
    result = transplant(resolve(str(target)), resolve(str(donor)), tmp_path / "out")
    assert result["copied"] == 259
    assert read_pair(tmp_path / "out")["needs_training"] == []
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        new, old = load_model(tmp_path / "out")(ids).logits, load_model(donor)(ids).logits
    assert torch.equal(new[..., :259], old[..., :259])


def test_the_result_is_aligned_and_says_what_needs_training(tmp_path: Path) -> None:
    target = resolve(str(with_words(tmp_path / "target", "abd")))
    donor = resolve(str(sentencepiece(tmp_path / "donor", [])))
    transplant(target, donor, tmp_path / "out")
    report = check_pair(target, resolve(str(tmp_path / "out")))
    assert report["verdict"] == "aligned, with 1 warning"
    (warning,) = [f["what"] for f in report["findings"] if f["level"] == "warns"]
    made = read_pair(tmp_path / "out")
    assert (
        made["made"][0]["copied"] + made["made"][0]["pieces"] + made["made"][0]["role"] + made["made"][0].get("mean", 0)
        == 260
    )
    assert 259 in made["needs_training"]
    assert 100 not in made["needs_training"]
    assert warning.startswith(f"rows of the drafter that were made and never trained: {len(made['needs_training'])} (")


def test_a_donor_that_vllm_would_not_run(tmp_path: Path) -> None:
    """D7: said when the donor is chosen."""
    target, donor = tiny.folder(tmp_path / "target"), sentencepiece(tmp_path / "donor", [])
    edit(
        donor / "config.json",
        lambda v: v.update(model_type="gemma2", architectures=["Gemma2ForCausalLM"], num_hidden_layers=4),
    )
    with pytest.raises(InputError, match="mixes layer types"):
        transplant(resolve(str(target)), resolve(str(donor)), tmp_path / "out")


def test_a_byte_that_the_donor_has_not() -> None:
    """Nothing to compose from: the mean, and no error."""
    donor = tiny.tokenizer()
    assert row_sources(tiny.tokenizer(), donor, 100)[200] == Row("mean", ())
    assert row_sources(tiny.tokenizer(), donor, 272)[200] == Row("copied", (200,))


def test_a_role_whose_id_has_no_row_is_no_source() -> None:
    """D4: the donor's eos lies above its rows; its string is not the target's."""
    donor = tiny.tokenizer()
    donor.add_special_tokens({"eos_token": "<end>"})
    assert donor.eos_token_id == 259
    target = tiny.tokenizer()
    target.add_special_tokens({"eos_token": "<stop>"})
    assert row_sources(target, donor, 259)[259] == Row("mean", ())
    assert row_sources(target, donor, 260)[259] == Row("role", (259,))
