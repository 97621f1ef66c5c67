"""Answering prompts: checks before any work, shards that survive a failure, and rows that say what the target thinks."""

import json
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distill.generate as module
from distill.answers import open_answers, shard_paths
from distill.generate import Job, choose_backend, generate, new_job, open_target, unanswered
from distill.in_vllm import head_of
from distill.prompts import Prompt, prompt
from distill.requests import Answerer, Completion, Request, Sampling, ending_ids, require_fit, tokenize
from pairing.errors import InputError, PartFailedError
from pairing.files import write_bytes
from pairing.pair import describe_model
from pairing.source import load_model, load_tokenizer, resolve
from recipes.config import parse
from recipes.generate import GenerateConfig, main, run
from tests import tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation config names two ending ids in a list, one of them common, so that answers end by themselves."""
    path = tiny.folder(tmp_path_factory.mktemp("target") / "tiny")
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, 113]}))
    return path


def texts(count: int) -> list[Prompt]:
    return [prompt([{"role": "user", "content": "word " * (i % 5) + str(i)}]) for i in range(count)]


def job(target: Path, out: Path, count: int = 10, **sampling: Any) -> Job:
    chosen = Sampling(**({"max_tokens": 16, "temperature": 0.0, "top_logprobs": 8, "seed": 0} | sampling))
    requests = tokenize(texts(count), load_tokenizer(target), "tiny")
    described = describe_model(resolve(str(target)))
    return new_job(
        "a", out, requests, chosen, target=described, rows=272, backend="transformers", prompts_source="some texts"
    )


def answered(target: Path, one: Job, max_num_seqs: int = 32) -> list[dict[str, Any]]:
    source, todo = resolve(str(target)), unanswered(one)
    with open_target(
        "transformers", source, context=0, top_logprobs=8, max_num_seqs=max_num_seqs, log=one.folder
    ) as answer:
        generate(one, todo, answer)
    rows: list[dict[str, Any]] = open_answers(one.folder).data.to_list()
    return rows


def parts(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Prompt and answer of a row with one answer, which ends it."""
    start, end = row["spans"]
    assert end == len(row["input_ids"])
    return row["input_ids"][:start], row["input_ids"][start:]


def test_head_from_flat_lists() -> None:
    """vLLM's position is the sampled token, then the K most likely: whether or not the sampled one is among them."""
    flat_ids = [7, 7, 5, 3, 9, 5, 7, 3]  # sampled 7, the top one; then sampled 9, which is none of the top 3
    flat_logprobs = [-0.5, -0.5, -1.5, -2.5, -6.0, -0.4, -1.6, -2.6]
    ids, logprobs = head_of(flat_ids, flat_logprobs, 2)
    assert ids.tolist() == [[7, 5, 3], [5, 7, 3]]
    np.testing.assert_allclose(logprobs, [[-0.5, -1.5, -2.5], [-0.4, -1.6, -2.6]])


def test_rows_hold_the_targets_own_distribution(target: Path, tmp_path: Path) -> None:
    """Against one whole forward per row. Position j is the distribution from which answer token j came (D13's kind)."""
    model = load_model(target)
    rows = answered(target, job(target, tmp_path / "a"))
    assert len(rows) == 10
    for row in rows:
        p, a = parts(row)
        with torch.inference_mode():
            logprobs = model(torch.tensor([p + a])).logits[0, len(p) - 1 : -1].double().log_softmax(-1)
        top = logprobs.topk(8)
        assert a == logprobs.argmax(-1).tolist()
        assert np.array(row["head_ids"]).reshape(-1, 8).tolist() == top.indices.tolist()
        np.testing.assert_allclose(np.array(row["head_logprobs"]).reshape(-1, 8), top.values, rtol=1e-3)
        np.testing.assert_allclose(row["tail_mass"], 1 - top.values.exp().sum(-1), atol=1e-5)


def test_answers_end_by_themselves(target: Path, tmp_path: Path) -> None:
    """D23's kind: natural stops, told apart from the length limit, and the ending token is part of the answer."""
    assert ending_ids(target) == [2, 113]  # one id in config and tokenizer, two in the generation config (D3)
    rows = answered(target, job(target, tmp_path / "a", 40))
    for row in rows:
        *inner, last = parts(row)[1]
        assert not {2, 113} & set(inner)
        assert (row["finish_reason"] == "stop") == (last in (2, 113))
        assert row["finish_reason"] == "stop" or len(parts(row)[1]) == 16
    reasons = [row["finish_reason"] for row in rows]
    assert 2 < reasons.count("stop") < 38
    stats = open_answers(tmp_path / "a").meta["stats"]
    assert (stats["stop"], stats["length"]) == (reasons.count("stop"), reasons.count("length"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_does_not_depend_on_its_batch(target: Path, tmp_path: Path, temperature: float) -> None:
    together = answered(target, job(target, tmp_path / "a", temperature=temperature))
    apart = answered(target, job(target, tmp_path / "b", temperature=temperature), max_num_seqs=1)
    for one, other in zip(together, apart, strict=True):
        assert (one["id"], one["input_ids"]) == (other["id"], other["input_ids"])
        np.testing.assert_allclose(one["head_logprobs"], other["head_logprobs"], rtol=2e-3)


def test_sampling_follows_temperature_and_seed(target: Path, tmp_path: Path) -> None:
    runs = {
        (t, seed): answered(target, job(target, tmp_path / f"{t}-{seed}", 60, temperature=t, seed=seed))
        for t, seed in ((0.0, 0), (0.3, 0), (0.3, 1), (1.0, 0))
    }
    said = {key: [row["input_ids"] for row in rows] for key, rows in runs.items()}
    assert said[0.3, 0] != said[0.3, 1]
    firsts = {t: np.array([np.exp(row["head_logprobs"][:8]) for row in runs[t, 0]]) for t in (0.0, 0.3, 1.0)}
    np.testing.assert_allclose(firsts[0.0], firsts[1.0], rtol=2e-3)  # always recorded at temperature 1
    drawn = {t: np.mean([parts(row)[1][0] == row["head_ids"][0] for row in runs[t, 0]]) for t in (0.0, 0.3, 1.0)}
    assert drawn[0.0] == 1
    assert drawn[1.0] < drawn[0.3] < 1


def fake(fail_after: int | None = None) -> Answerer:
    """Answers in reverse order, and dies where told to: what the shards and the resuming see of a real engine."""

    def answer(waiting: deque[Request], sampling: Sampling) -> Iterator[Completion]:
        for count, r in enumerate(reversed(waiting)):
            if count == fail_after:
                raise PartFailedError("the engine died")
            ids = [int(r.prompt.id[:4], 16) % 272, 2]
            head = np.tile(np.arange(8, dtype=np.int32), (2, 1))
            yield Completion(r, ids, "stop", head, np.full((2, 8), -3, np.float32))

    return answer


def test_finished_prompts_stay_when_the_engine_dies(target: Path, tmp_path: Path) -> None:
    stopped, whole = job(target, tmp_path / "a", 100), job(target, tmp_path / "b", 100)
    with pytest.raises(PartFailedError):
        generate(stopped, unanswered(stopped), fake(fail_after=70))
    assert len(shard_paths(stopped.folder)) == 3  # two full ones, and what was finished when it died
    with pytest.raises(InputError, match="not complete"):
        open_answers(stopped.folder)
    todo = unanswered(stopped)
    assert len(todo) == 30
    stats = generate(stopped, todo, fake())
    assert (stats["prompts"], stats["last_run"]["prompts"]) == (100, 30)
    generate(whole, unanswered(whole), fake())
    assert open_answers(stopped.folder).data.to_list() == open_answers(whole.folder).data.to_list()
    assert generate(stopped, unanswered(stopped), fake(fail_after=0)) == stats  # nothing to do: nothing is asked


def test_logits_that_are_no_numbers_stop_it(target: Path, tmp_path: Path) -> None:
    """What is unlikely without end (-inf) is fine; NaN is named with its prompt, and what was finished stays."""
    one = job(target, tmp_path / "a", 10)

    def broken(waiting: deque[Request], sampling: Sampling) -> Iterator[Completion]:
        for count, done in enumerate(fake()(waiting, sampling)):
            done.head_logprobs_NK[1, 5] = -np.inf
            if count == 6:
                done.head_logprobs_NK[1] = np.nan
            yield done

    with pytest.raises(
        PartFailedError, match=rf"prompt {one.requests[3].prompt.id}: .* is not a number .*skip_failed=1"
    ):
        generate(one, unanswered(one), broken)
    assert len(unanswered(one)) == 4
    other = replace(job(target, tmp_path / "b", 10), skip_failed=1)
    stats = generate(other, unanswered(other), broken)
    assert [left["id"] for left in stats["left_out"]] == [one.requests[3].prompt.id]
    assert stats["prompts"] == len(open_answers(other.folder).data) == 9


def test_a_stop_just_after_a_shard_does_not_write_it_twice(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(target, tmp_path / "a", 50)

    def stopped(path: Path, data: bytes) -> None:
        write_bytes(path, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr("distill.answers.write_bytes", stopped)
        with pytest.raises(KeyboardInterrupt):
            generate(one, unanswered(one), fake())
    assert generate(one, unanswered(one), fake())["prompts"] == 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_computes_nan_is_one_line(target: Path, tmp_path: Path, temperature: float) -> None:
    model = load_model(target)
    model.get_decoder().norm.weight.data.fill_(torch.nan)
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    model.save_pretrained(broken)
    one = job(broken, tmp_path / "a", 3, temperature=temperature)
    with pytest.raises(PartFailedError, match=r"prompt \w+: the target's distribution .* is not a number"):
        answered(broken, one)


def test_answers_made_otherwise_are_not_mixed_in(target: Path, tmp_path: Path) -> None:
    first = job(target, tmp_path / "a")
    generate(first, unanswered(first), fake())
    for other, what in (
        (job(target, tmp_path / "a", temperature=0.5), "sampling"),
        (job(target, tmp_path / "a", seed=3), "seed"),
        (job(target, tmp_path / "a", 11), "prompts_digest"),
    ):
        with pytest.raises(InputError, match=rf"holds other answers \(they differ in {what}\)"):
            unanswered(other)


def test_prompts_that_cannot_be_answered(target: Path, tmp_path: Path) -> None:
    requests = tokenize(texts(10), load_tokenizer(target), "tiny")
    longest = max(len(r.prompt_ids) for r in requests)
    require_fit(requests, 16, longest + 16, "set a")
    require_fit(requests, 16, None, "set a")
    first = next(r for r in requests if len(r.prompt_ids) > longest - 2)
    with pytest.raises(InputError) as caught:
        require_fit(requests, 16, longest + 14, "set a")
    over = sum(len(r.prompt_ids) > longest - 2 for r in requests)
    assert f"set a: {over} of 10 prompts are longer than the context of {longest + 14} tokens: the first is " in str(
        caught.value
    )
    assert f"{first.prompt.id} with {len(first.prompt_ids)} tokens and max_tokens=16" in str(caught.value)
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(
        InputError, match=rf"prompt {texts(1)[0].id}: the target's chat template refuses it \(no system mess"
    ):
        tokenize(texts(1), tokenizer, "tiny")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="tiny: no chat template"):
        tokenize(texts(1), tokenizer, "tiny")
    with pytest.raises(InputError, match="top_logprobs=300 is more than the target's 272 vocabulary rows"):
        job(target, tmp_path / "a", top_logprobs=300)


def test_backend_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "engine", lambda: None)
    monkeypatch.setattr("pairing.engine.engine", lambda: None)
    assert choose_backend("auto") == "transformers"
    with pytest.raises(InputError, match=r"generate with backend=vllm needs vLLM, which is not installed: .*install"):
        choose_backend("vllm")


def words(target: Path, out: Path, *more: str) -> list[str]:
    return [
        f"target={target}",
        f"out={out}",
        "backend=transformers",
        "top_logprobs=8",
        "sets.train.prompts=orders",
        "sets.train.limit=6",
        "sets.train.max_tokens=4",
        "sets.train.system=Hi",
        *more,
    ]


def test_recipe(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # as a terminal, or a log, that is no wider
    out = tmp_path / "data"
    argv = words(target, out, "sets.test.prompts=orders", "sets.test.split=test", "sets.test.limit=3",
                 "sets.test.system=Hi", "sets.test.max_tokens=4")  # fmt: skip
    assert main([*argv, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["sets"]
    assert not out.exists()
    assert main([*argv, "--dry-run"]) == 0
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "ended by itself" in told
    assert "disk, at most" in told
    assert "…" not in told, "nothing is cut off"
    assert main([*argv, "--json"]) == 0  # again: nothing to do
    stats = json.loads(capsys.readouterr().out)["sets"]
    for name, count in (("train", 6), ("test", 3)):
        found = open_answers(out / name)
        assert len(found.data) == stats[name]["prompts"] == plan[name]["prompts"] == count
        assert plan[name]["prompt_tokens"] == stats[name]["prompt_tokens"]["total"]
        assert stats[name]["answer_tokens"]["total"] <= plan[name]["answer_tokens_at_most"]
        # a short answer's Arrow framing is not in the estimate
        assert stats[name]["bytes"] < plan[name]["bytes_at_most"] + 4096
    assert (out / "config.yaml").is_file()
    assert (out / "provenance.json").is_file()


def test_recipe_refuses_before_it_writes(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    cases = {
        r"context of 512 tokens: the first is [0-9a-f]{16}": ["sets.train.max_tokens=500"],
        "max_model_len=1024 is more than the target's own context of 512": ["max_model_len=1024"],
        "context of 40 tokens": ["max_model_len=40"],
        "a set's name becomes a folder": ["sets.a/b.prompts=humaneval"],
        "sets.train.limt: unknown key; the nearest valid one is sets.train.limit": ["sets.train.limt=3"],
        "sets.x.prompts: needs a value": ["sets.x.limit=3"],
        "nowhere.jsonl: no such file": ["sets.train.prompts=nowhere.jsonl"],
        "no such model": ["target=./nowhere"],
        "backend: input should be 'auto', 'vllm' or 'transformers'": ["backend=trt"],
        "top_logprobs=300 is more": ["top_logprobs=300"],
    }
    for says, more in cases.items():
        with pytest.raises(InputError, match=says):
            main(words(target, out, *more))
        assert not out.exists()
    main(words(target, out))
    with pytest.raises(InputError, match=r"data holds another run \(its config differs in temperature\)"):
        main(words(target, out, "temperature=1"))


def test_recipe_takes_a_users_file(target: Path, tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"prompt": "Hi"}\n{"messages": [{"role": "user", "content": "Ho"}]}\n')
    config, _ = parse(GenerateConfig, [f"target={target}", f"out={tmp_path / 'o'}", "backend=transformers",
                                       f"sets.train.prompts={tmp_path / 'my.jsonl'}", "sets.train.max_tokens=3"])  # fmt: skip
    from rich.console import Console

    stats = run(config, Console(stderr=True))
    assert stats["train"]["prompts"] == 2
    chats = [json.loads(m)[0]["content"] for m in open_answers(tmp_path / "o" / "train").data["messages"]]
    assert sorted(chats) == ["Hi", "Ho"]


def test_recipe_holds_prompts_out(target: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "o"
    file.write_text("".join(json.dumps({"prompt": f"word {i}"}) + "\n" for i in range(30)))
    argv = [f"target={target}", f"out={out}", "backend=transformers", "top_logprobs=4", f"sets.train.prompts={file}",
            "sets.train.max_tokens=2", "sets.train.heldout=5", "sets.train.limit=8"]  # fmt: skip
    assert main(argv) == 0
    train, held = (set(open_answers(out / name).data["id"]) for name in ("train", "train-heldout"))
    assert (len(train), len(held), len(train & held)) == (8, 5, 0)
    with pytest.raises(InputError, match=r"train\.heldout makes the set train-heldout, which is there already"):
        main([*argv, f"sets.train-heldout.prompts={file}"])
    with pytest.raises(InputError, match=r"sets\.train\.heldout: orders have a split of their own"):
        main(words(target, tmp_path / "q", "sets.train.heldout=2"))
