"""A target that is a base and a LoRA adapter, from its answers to the line that serves the drafter: what most fine-tuned targets
are. Every step is given the adapter's folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from distill.answers import open_answers, spans_of
from distill.settings import on_policy
from distill.train import Settings
from pairing.files import read_json, read_jsonl
from pairing.pair import read_pair
from pairing.source import load_model, resolve
from recipes import distill, generate, init, serve
from tests import tiny
from tests.integration.test_distill import BASE
from tests.unit.test_source import adapter

K, SEED = 8, 1


def test_from_an_adapters_answers_to_the_line_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("pairing.source.ADAPTER_CACHE", tmp_path / "cache")
    # as many rows as ids: a random model would say its padding ids too
    base, mine = tiny.folder(tmp_path / "base", layers=4, rows=tiny.REAL_TOKENS), tmp_path / "my-adapter"
    adapter(mine, base)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i} " + "word " * (i % 3)}) + "\n" for i in range(12)))
    words = [f"target={mine}", f"out={tmp_path / 'answers'}", f"top_logprobs={K}", "backend=transformers"]
    words += [f"sets.train.prompts={prompts}", "sets.train.heldout=4", "sets.train.max_tokens=12"]
    assert generate.main(words) == 0

    model = PeftModel.from_pretrained(load_model(base), str(mine)).eval()
    rows = list(open_answers(tmp_path / "answers" / "train").data)
    for row in rows:  # the recorded heads are those of PEFT's own forward
        ids, ((start, end),) = torch.tensor([row["input_ids"]]), spans_of(row["spans"])
        with torch.no_grad():
            logp = model(ids).logits[0, start - 1 : end - 1].log_softmax(-1)
        top = logp.topk(K).values.numpy()
        np.testing.assert_allclose(np.array(row["head_logprobs"]).reshape(-1, K), top, rtol=2e-3, atol=2e-3)
        at = torch.tensor(row["head_ids"]).view(-1, K)
        np.testing.assert_allclose(logp.gather(1, at).numpy(), top, rtol=2e-3, atol=2e-3)
    assert len(rows) == 8

    draft, out = tmp_path / "draft", tmp_path / "distilled"
    assert init.main([f"target={mine}", "layers=[0, 3]", f"out={draft}"]) == 0
    assert any(on_policy(Settings(**{**BASE, "seed": SEED, "on_policy": 0.5, "max_steps": 2}), step) for step in (0, 1))
    words = [f"target={mine}", f"draft={draft}", f"data={tmp_path / 'answers' / 'train'}", f"out={out}", f"seed={SEED}"]
    words += [f"heldout.own={tmp_path / 'answers' / 'train-heldout'}", "signal=online", "on_policy=0.5", "max_steps=2"]
    try:
        assert distill.main([*words, "batch_size=4", "threads=1"]) == 0
    finally:
        torch.set_num_threads(threads)
    log = [row for row in read_jsonl(out / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in log] == [1, 2]
    assert all(np.isfinite(row["loss"]) for row in log)
    merged = resolve(str(mine)).path
    assert merged.parent == tmp_path / "cache"
    assert read_pair(out / "drafter")["target"]["digests"] == read_pair(draft)["target"]["digests"]

    capsys.readouterr()
    assert serve.main([str(out / "drafter"), "max_model_len=256", "--dry-run"]) == 0
    told = capsys.readouterr()
    line = shlex.split(told.out)
    assert str(merged) in line
    assert str(mine) not in line
    assert json.loads(line[line.index("--speculative-config") + 1])["model"] == str(out / "drafter")
    assert "not the target" not in told.err
    assert read_json(merged / "source.json")["adapter"] == str(mine)
