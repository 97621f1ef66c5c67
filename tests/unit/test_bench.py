"""The benches: rivals train what we train, the floor counts what torch counts, differences are paired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distill.losses import LOSSES
from pairing.files import read_json
from pairing.source import load_model, load_tokenizer
from scripts import bench_common as common
from scripts import bench_distill, bench_objectives, bench_parallel, bench_quantize, bench_served
from tests.stored_answers import answered, store
from tests.tiny import folder, model

STEPS, SIZE = 3, 4
TASK = {"lr": 1e-3, "batch_size": SIZE, "trainable": "layers"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target, its answers, and a drafter of other weights."""
    temp = tmp_path_factory.mktemp("pair")
    target = folder(temp / "target")
    draft = folder(temp / "draft", layers=1, seed=1)
    return {"target": target, "draft": draft, "train": store(temp / "train", answered(target, 14, seed=0), target)}


def test_the_plain_loop_trains_what_our_loop_trains(pair: dict[str, Path]) -> None:
    """Same rows, order, loss, rate and parameters, so the same weights: else the bench compares two different things."""
    ours, plain, target = (load_model(pair[name]) for name in ("draft", "draft", "target"))
    rows = common.load_rows(pair["train"], ours, "train")
    common.train(
        ours, rows, losses={"forward_kl": 1.0}, steps=STEPS, batch_size=SIZE, lr=1e-3, seed=0, trainable="layers", target=target
    )  # fmt: skip
    params = [p for _, p in bench_distill.freeze(plain, "layers")]
    steps = common.batches(rows, steps=STEPS, batch_size=SIZE, seed=0)
    assert len(bench_distill.plain(TASK, plain, target, rows, steps, params)) == STEPS
    untrained = load_model(pair["draft"]).state_dict()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[name], weight, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert any(float((weight - untrained[name]).abs().max()) > 1e-3 for name, weight in plain.state_dict().items())


def test_batches_go_on_into_the_next_epoch(pair: dict[str, Path]) -> None:
    """14 rows in windows of 4 are an epoch of 4 steps, the last one short."""
    rows = common.load_rows(pair["train"], load_model(pair["draft"]), "train")
    steps = common.batches(rows, steps=9, batch_size=SIZE, seed=0)
    first, second = ([i for b in steps[at : at + 4] for i in b.ids] for at in (0, 4))
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second
    done = common.train(
        load_model(pair["draft"]), rows, losses={"forward_kl": 1.0}, steps=9, batch_size=SIZE, lr=1e-3, seed=0,
        trainable="layers",
    )  # fmt: skip
    supervised = torch.tensor([len(b.row_N) for b in steps]).cumsum(0).tolist()
    assert [row["tokens"] for row in done] == supervised


def test_sequences_are_the_stored_answers(pair: dict[str, Path]) -> None:
    answers = {a.prompt.id: a for a in answered(pair["target"], 14, seed=0)}
    rows = common.load_rows(pair["train"], load_model(pair["draft"]), "train")
    for batch in common.batches(rows, steps=4, batch_size=SIZE, seed=0):
        for id_, (ids, start) in zip(batch.ids, common.sequences(batch), strict=True):
            assert ids == answers[id_].input_ids
            assert [(start, len(ids))] == answers[id_].spans


def test_the_floor_counts_the_products_that_torch_counts() -> None:
    """Forward and backward of a real decoder with its embedding frozen; the first layer's norm still asks for all of it."""
    net = model(layers=2)
    net.get_input_embeddings().weight.requires_grad_(False)
    ids = torch.randint(3, 200, (1, 40))
    with FlopCounterMode(display=False) as counted:
        net.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    products = counted.get_flop_counts()["Global"]
    found = sum(n for op, n in products.items() if str(op) in ("aten.mm", "aten.addmm"))
    shapes = bench_distill.linears(net.config, 40)
    assert found == bench_distill._flops(bench_distill.backward(shapes)) > 0


def test_a_difference_is_paired_over_prompts() -> None:
    """Prompts that vary a lot and an arm that is 0.1 better on each: the interval is narrow, and 0 against itself."""

    def scores(gain: float) -> list[dict[str, Any]]:
        return [
            {"id": str(i), "tokens": 10, "top1": i + 10 * gain, "accepted": [[1] * (i % 5) + [0] * (10 - i % 5)]}
            for i in range(8)
        ]

    point, low, high = common.difference("top1", [scores(0.1), scores(0.3)], [scores(0.1)])
    assert point == pytest.approx(0.1)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    assert common.difference("tau", [scores(0.0)], [scores(0.0)]) == (0.0, 0.0, 0.0)


def test_every_arm_names_losses_that_there_are() -> None:
    for arm in bench_objectives.ARMS:
        for temperature in (0.0, 0.7):
            assert set(bench_objectives.losses_of(arm, temperature)) <= set(LOSSES), arm


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    """Results on disk are taken by their spec, whatever else they hold; a failed child is a line with the reason."""
    one, other = common.spec(case="a", repeat=0), common.spec(case="b", repeat=0)
    out = tmp_path / "out.jsonl"
    common.append_jsonl(out, one | {"tokens_per_s": 1.0})
    common.append_jsonl(out, other | {"error": "killed"})
    results = common.run_children("no_such_module", [one, other], out, threads=1)
    assert results[0]["tokens_per_s"] == 1.0
    assert "No module named" in results[1]["error"]
    assert len(common.read_jsonl(out)) == 3


def test_served_acceptance_lengths_by_hand() -> None:
    """Two prompts: 1 + 8 tokens in 1 + 2 chunks and 1 + 6 in 1 + 3: τ = 14 / 5; the other arm's 14 tokens took 14 rounds."""
    ours = [{"id": "b", "output_tokens": 7, "chunks": 4}, {"id": "a", "output_tokens": 9, "chunks": 3}]
    theirs = [row | {"chunks": row["output_tokens"]} for row in ours]
    a, b = bench_served.rounds_of(ours), bench_served.rounds_of(theirs)
    assert a.tolist() == [[8, 6], [2, 3]]
    difference, low, high = bench_served.difference([a, a], [b])
    assert difference == pytest.approx(14 / 5 - 1)
    assert low == pytest.approx(6 / 3 - 1)  # every draw of the second prompt alone
    assert high == pytest.approx(8 / 2 - 1)


def test_a_kept_drafter_loads_with_its_tokenizer(pair: dict[str, Path], tmp_path: Path) -> None:
    task = {"arm": "fkl, K=32", "seed": 1, "keep": str(tmp_path)}
    drafter = load_model(pair["draft"])
    for _ in range(2):  # again after a kill
        bench_objectives.keep(drafter, pair["draft"], bench_objectives.kept_at(task))
    kept = tmp_path / "fkl-k-32-1"
    again = load_model(kept)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
    assert len(load_tokenizer(kept)) == len(load_tokenizer(pair["draft"]))


def test_a_run_begins_with_the_layers_that_its_arm_names(tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "target", layers=4), folder(tmp_path / "draft", layers=2, seed=1)
    train = store(tmp_path / "train", answered(target, 4, seed=0), target)
    task = {"target": str(target), "draft": str(draft), "train": str(train)}
    assert bench_objectives.start_of(task, tmp_path) == draft
    old = load_model(target).model.layers
    for layers, chosen in (("first", [0, 1]), ("last", [2, 3]), ("spaced", [0, 3]), ("influence", None)):
        start = bench_objectives.start_of(task | {"layers": layers}, tmp_path / layers)
        made = read_json(start / "pair.json")["made"][-1]["layers"]
        assert chosen in (None, made)
        for number, new in zip(made, load_model(start).model.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old[number].parameters(), new.parameters(), strict=True))


def test_what_4_bits_lose_is_counted_from_the_trained_drafter_in_full_precision() -> None:
    """By hand: 100 tokens a prompt, 90 right in full precision; NF4 loses 3 of them and 1 after the part, W4A16 2 and 0.4."""

    def scores(right: float) -> list[dict[str, Any]]:
        sums = {"top1": right, "alpha_low": right, "alpha_high": right}
        return [{"id": str(i), "tokens": 100, "accepted": [[1] * 90 + [0] * 10]} | sums for i in range(4)]

    def row(part: str | None, full: float, **copies: float) -> dict[str, Any]:
        found = {name: scores(right) for name, right in {"full": full, **copies}.items()}
        return {"part": part, "scores": found, "group_size": 64, "seed": 0, "steps": 5, "batch_size": 8, "lr": 1e-4}

    rows = [row(None, 90, nf4=87, w4a16=88), row("nf4", 90, nf4=89, w4a16=88), row("w4a16", 90, nf4=87, w4a16=89.6)]
    said = bench_quantize.report(rows)
    assert "| as trained: NF4 | 0.8700 | 0.8700–0.8700 |" in said
    assert "-0.0300 (-0.0300 to -0.0300)" in said
    assert said.count("W4A16 |") == 2  # what is trained for one format is not served in the other
    assert "NF4 missed (+1.00 points lost); W4A16 met (+0.40 points lost)" in said


def test_prompts_from_documented_functions(tmp_path: Path) -> None:
    said = "Twelve words are enough to say what the function here is for."
    (tmp_path / "a.py").write_text(
        f'class C:\n    def method(self):\n        """{said}"""\n\n'
        f'def one(a, b=1):\n    """{said}\n\n    And more.\n    """\n    return a\n\n'
        'def short():\n    """Too short."""\n\ndef bare():\n    return 1\n'
    )
    (head,) = bench_parallel.functions(tmp_path)
    assert head == f'def one(a, b=1):\n    """{said}\n\n    And more.\n    """\n'
    compile(head, "head", "exec")


def test_the_k_that_is_served_is_the_fastest_by_replay_and_costs() -> None:
    """τ 2, 2.5 and 2.6 over rounds of 1.2, 1.4 and 1.6 target steps: 1.67, 1.79 and 1.63."""
    rounds = {"1": {"round": 1.2}, "2": {"round": 1.4}, "3": {"round": 1.6}}
    assert bench_parallel.fastest({"1": 2.0, "2": 2.5, "3": 2.6, "4": None}, rounds) == 2


def test_seeds_of_one_depth_are_put_together_and_void_runs_left_out() -> None:
    def row(speed: float, tau: float | None, K: int, void: str | None = None) -> dict[str, Any]:
        return {"group": None, "kind": "draft_model", "arm": "one", "temperature": 0.0, "void": void, "speedup": speed,
                "acceptance_length": tau, "num_speculative_tokens": K}  # fmt: skip

    runs = {
        "5-0": [row(2.0, 4.0, 3)],
        "5-1": [row(3.0, None, 4)],
        "5-2": [row(9.0, 9.0, 9, "died")],
        "2-0": [row(1.0, 1.0, 1)],
    }
    (said,) = bench_parallel.over_seeds("orders", runs)
    assert said.splitlines()[2:] == ["| orders | 5 | 2 | 0 | one | 3, 4 | 2.50 (2.00–3.00) | 4.00 (4.00–4.00) |"]
    assert bench_parallel.over_seeds("orders", {"2-0": runs["2-0"]}) == []
