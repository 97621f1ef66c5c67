"""Pre-flight: each refusal from numbers alone, with the flag to change, and the same pair let through beside it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pairing import preflight as module
from pairing.budgets import kv_bytes_per_token, memory_numbers, weight_bytes
from pairing.engine import Engine, engine
from pairing.engine_support import Support, probe, support
from pairing.errors import InputError
from pairing.finding import Finding
from pairing.parallel_drafting import trained_findings
from pairing.preflight import preflight, preflight_report, require_start
from pairing.serving_plan import Memory, Model, Serving, serve_line
from pairing.source import resolve
from pairing.speculative_config import KEYS, schedule_fault
from pairing.weights import TensorInfo
from tests import tiny

GIB = 2**30
CPU, CUDA = Engine("0.32.0", "cpu", None), Engine("0.32.0", "cuda", None)
ROOMY = Memory(64 * GIB, 60 * GIB)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


def model(values: int = 10**6, **config: Any) -> Model:
    return Model(CONFIG | config, {"model.embed_tokens.weight": TensorInfo("F32", (values,), Path("x"), 4 * values)})


def blocks(findings: list[Finding], where: str = "") -> list[Finding]:
    return [f for f in findings if f.level == "blocks" and where in f.where]


def fly(serving: Serving, engine: Engine = CUDA, memory: Memory = ROOMY, **kwargs: Any) -> list[Finding]:
    return preflight(
        kwargs.pop("target", model()),
        kwargs.pop("drafter", model()),
        serving,
        engine,
        memory,
        kwargs.pop("found", None),
    )


@pytest.mark.parametrize("engine", [CPU, CUDA])
def test_a_pair_that_starts(engine: Engine) -> None:
    assert not blocks(fly(Serving(max_num_seqs=8, max_model_len=1024, gpu_memory_utilization=0.5), engine))


# D6


def test_requests_past_the_drafters_last_position() -> None:
    """D6: 512 against 2048 positions, requests to 1024: stopped, with the safe length and its price."""
    short = model(max_position_embeddings=512)
    for serving in (Serving(max_model_len=1024, max_num_seqs=8), Serving(max_num_seqs=8)):
        (finding,) = blocks(fly(serving, drafter=short), "context")
        assert "more than the drafter's 512 positions" in finding.what
        assert "`--max-model-len 512`" in finding.fix
        assert "requests of more than 512 tokens" in finding.fix
    assert not blocks(fly(Serving(max_model_len=512, max_num_seqs=8), drafter=short), "context")


def test_overrides_lengthen_the_target_only() -> None:
    """D6: the target is served with linear scaling by 4, which vLLM does not hand on to the drafter."""
    longer = Serving(max_num_seqs=8, hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    (finding,) = blocks(fly(longer), "context")
    assert "the target's 8192 is more than the drafter's 2048" in finding.what
    assert not blocks(fly(replace(longer, max_model_len=2048)), "context")
    (finding,) = blocks(fly(Serving(max_model_len=4096, max_num_seqs=8)), "context")
    assert "more than the target's 2048" in finding.what


def test_the_drafts_own_length() -> None:
    """D6: vLLM refuses one that is longer than either model's."""
    serving = Serving(max_model_len=512, max_num_seqs=8, speculative_config={"max_model_len": 513})
    (finding,) = blocks(fly(serving), "context")
    assert "more than the 512 that both models take" in finding.what
    assert not blocks(fly(replace(serving, speculative_config={"max_model_len": 256})), "context")


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ({"original_max_position_embeddings": 4096, "rope_scaling": LONGROPE}, 4096),
        ({"original_max_position_embeddings": 8192, "rope_parameters": LONGROPE}, 8192),
        ({"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su"}}, 4096),  # as Phi-3 called it first
        ({"model_type": "phi3", "rope_parameters": LONGROPE}, 4096),  # written without what is its class's own
        ({"rope_parameters": LONGROPE}, 131072),
        ({"original_max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "factor": 32.0}}, 131072),
    ],
)
def test_longrope_without_a_flag_is_served_at_its_first_length(config: dict[str, Any], served: int) -> None:
    """D6: Phi-3-128k and a drafter cut from it. vLLM takes 4096 by itself and up to 131072 where a flag says so."""
    long = model(max_position_embeddings=131072, **config)
    asked = Serving(max_num_seqs=8, kv_cache_gib=1)
    assert memory_numbers(long, long, CPU, ROOMY, asked)["length"] == served
    shorter = model(max_position_embeddings=8192)
    assert bool(blocks(fly(asked, CPU, target=long, drafter=shorter), "context")) == (served > 8192)
    assert not blocks(fly(replace(asked, max_model_len=8192), CPU, target=long, drafter=shorter), "context")
    found = fly(replace(asked, max_model_len=16384), CPU, target=long, drafter=long)
    assert not blocks(found, "context")
    warned = [f.what for f in found if f.where == "context" and f.level == "warns"]
    assert [f"up to {served} tokens" in what for what in warned] == ([True] if served < 16384 else [])


# D8


@pytest.mark.parametrize(
    ("version", "backend", "forced", "multimodal", "what"),
    [
        ("0.13.0", "cuda", None, False, "has no draft_model"),
        ("0.31.0", "cpu", None, False, "has no draft_model"),
        ("0.24.0", "cuda", True, False, "VLLM_USE_V2_MODEL_RUNNER=1 forces a runner"),
        ("0.32.0", "cpu", True, False, "VLLM_USE_V2_MODEL_RUNNER=1 forces a runner"),
        ("0.20.1", "cuda", None, True, "refuses draft models beside a multimodal target"),
        ("0.20.1", "cuda", None, False, None),
        ("0.20.1", "cuda", False, False, None),
        ("0.32.0", "cuda", True, True, None),
        ("0.33.1", "cpu", None, True, None),
    ],
)
def test_support_by_version_back_end_and_runner(
    version: str, backend: str, forced: bool | None, multimodal: bool, what: str | None
) -> None:
    """D8: forced V2 runner; target with a vision_config; older builds; a CPU-only host."""
    target = model(**({"vision_config": {}, "text_config": CONFIG} if multimodal else {}))
    serving = Serving(max_num_seqs=8, max_model_len=512, gpu_memory_utilization=0.5, force_v2=forced)
    found = blocks(fly(serving, Engine(version, backend, None), target=target), "engine")
    assert [what in f.what for f in found if what] == ([True] if what else [])
    assert all("offline estimate" in f.fix and "says nothing of speed" in f.fix for f in found)


def test_where_table_and_probe_disagree_the_probe_is_believed() -> None:
    """D8: a nightly whose V2 runner drafts already."""
    nightly = Engine("0.24.0", "cuda", None)
    serving = Serving(max_num_seqs=8, max_model_len=512, gpu_memory_utilization=0.5, force_v2=True)
    assert blocks(fly(serving, nightly), "engine")
    found = fly(serving, nightly, found=Support(True, True, True, "read"))
    assert not blocks(found, "engine")
    assert any("is not as our table says (v2, multimodal" in f.what for f in found)


@pytest.mark.parametrize(
    ("version", "backend", "forced", "mask", "what"),
    [
        ("0.32.0", "cuda", None, {"pard_token": 3}, None),
        ("0.32.0", "cpu", False, {"mask_token_id": 3}, None),
        (
            "0.32.0",
            "cuda",
            True,
            {"pard_token": 3},
            "VLLM_USE_V2_MODEL_RUNNER=1 forces a runner that has no parallel_drafting",
        ),
        ("0.14.0", "cuda", None, {"pard_token": 3}, "vLLM 0.14.0 (cuda) has no parallel_drafting for draft models"),
        ("0.32.0", "cuda", None, {}, "the drafter's config.json names no mask token"),
    ],
)
def test_parallel_drafting(
    version: str, backend: str, forced: bool | None, mask: dict[str, int], what: str | None
) -> None:
    serving = Serving(
        max_num_seqs=8,
        max_model_len=512,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.5,
        force_v2=forced,
        kv_cache_gib=1,
    )
    parallel = replace(serving, speculative_config={"parallel_drafting": True})
    pair = {"engine": Engine(version, backend, None), "drafter": model(**mask)}
    found = blocks(fly(parallel, **pair))
    assert [f.what.startswith(what) for f in found if what] == ([True] if what else [])
    assert all("leave parallel_drafting out" in f.fix for f in found)
    assert not blocks(fly(serving, **pair))  # one by one it starts everywhere


def test_a_schedule_of_several_k_does_not_go_with_one_pass() -> None:
    """vLLM 0.32 served it, and ended at the first step with the smaller K (docs/notebook.md)."""
    serving = Serving(max_num_seqs=8, max_model_len=512, kv_cache_gib=1, num_speculative_tokens=5)
    pair = {"engine": Engine("0.32.0", "cpu", None), "drafter": model(pard_token=3)}

    def found(schedule: list[list[int]], **more: Any) -> list[str]:
        words = {"num_speculative_tokens_per_batch_size": schedule, **more}
        return [f.what for f in blocks(fly(replace(serving, speculative_config=words), **pair))]

    (one,) = found([[1, 1, 3], [2, 8, 5]], parallel_drafting=True)
    assert one.startswith("num_speculative_tokens_per_batch_size asks for several K ([[1, 1, 3], [2, 8, 5]])")
    assert not found([[1, 8, 5]], parallel_drafting=True)
    assert not found([[1, 4, 5], [5, 8, 0]], parallel_drafting=True)
    assert not found([[1, 1, 3], [2, 8, 5]])


def test_a_set_acceptance_is_for_gpus() -> None:
    """The CPU back end takes the key and ignores it, so a figure measured there would be the drafter's own."""
    words = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5]}
    serving = Serving(num_speculative_tokens=2, max_num_seqs=8, max_model_len=1024, speculative_config=words)
    (found,) = blocks(fly(serving, CPU))
    assert found.what.startswith("vLLM 0.32.0 (cpu) ignores rejection_sample_method=synthetic")
    assert not blocks(fly(serving, CUDA))


def test_more_drafts_than_were_trained(tmp_path: Path) -> None:
    serving = Serving(num_speculative_tokens=6, speculative_config={"parallel_drafting": True})
    pair: dict[str, Any] = {"parallel_drafting": {"num_speculative_tokens": 6, "mask_id": 3}}
    (tmp_path / "pair.json").write_text(json.dumps(pair))
    assert trained_findings(tmp_path, serving) == []
    (found,) = trained_findings(tmp_path, replace(serving, num_speculative_tokens=8))
    assert found.level == "warns"
    assert found.what == "num_speculative_tokens is 8, the drafter was trained to draft 6 in one pass"
    assert trained_findings(tmp_path, Serving(num_speculative_tokens=8)) == []
    (tmp_path / "pair.json").write_text("{}")
    assert "does not say that it was trained" in trained_findings(tmp_path, serving)[0].what


def test_the_probe_reads_the_package(tmp_path: Path) -> None:
    def write(name: str, text: str = "") -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert probe("cuda", tmp_path) == Support(False, False, False, f"read in {tmp_path}", w4a16=False)
    write("v1/spec_decode/draft_model.py")
    write("v1/spec_decode/eagle.py", "self._raise_if_multimodal()")
    assert probe("cuda", tmp_path) == Support(True, False, False, f"read in {tmp_path}", w4a16=False)
    write("model_executor/layers/quantization/kernels/mixed_precision/marlin.py", "class MarlinLinearKernel(X):")
    write("v1/spec_decode/eagle.py", "self._warn_if_multimodal()")
    write("v1/spec_decode/llm_base_proposer.py", 'hasattr(config, "pard_token")')
    assert probe("cuda", tmp_path) == Support(True, False, True, f"read in {tmp_path}", parallel=True)
    write("v1/spec_decode/llm_base_proposer.py")
    write("v1/worker/gpu/spec_decode/__init__.py", "elif speculative_config.uses_draft_model():")
    write("v1/worker/cpu_model_runner.py", 'assert x, "spec decode is not supported."')
    assert probe("cuda", tmp_path) == Support(True, True, True, f"read in {tmp_path}")
    found = probe("cpu", tmp_path)
    assert found is not None
    assert not found.v1
    assert not found.w4a16
    write("model_executor/kernels/linear/mixed_precision/cpu.py", "class CPUWNA16LinearKernel(X):")
    found = probe("cpu", tmp_path)
    assert found is not None
    assert found.w4a16


def test_table_and_probe_agree_on_the_installed_version() -> None:
    """The table's line is true of what is installed here: without that it would be folklore."""
    installed = engine()
    assert installed is not None
    found = probe(installed.backend)
    assert found is not None
    assert replace(found, seen="") == replace(support(installed.version, installed.backend), seen="")


def test_without_vllm_only_what_configs_say() -> None:
    findings = preflight(model(), model(max_position_embeddings=512), Serving(), None, ROOMY)
    assert [f.where for f in blocks(findings)] == ["context"]
    assert any("not installed" in f.what for f in findings)


# D9


@pytest.mark.parametrize(
    ("seqs", "tokens", "more", "level"),
    [
        (64, 64, {}, "blocks"),
        (128, 64, {}, "blocks"),
        (64, 65, {}, "warns"),
        (64, 320, {}, None),
        (64, 319, {}, "warns"),
        (64, 256, {"parallel_drafting": True}, "blocks"),
        (64, 512, {"parallel_drafting": True}, None),
    ],
)
def test_token_budget(seqs: int, tokens: int, more: dict[str, Any], level: str | None) -> None:
    """D9: max_num_seqs >= max_num_batched_tokens leaves nothing to schedule; both flags are named, and what they fix."""
    serving = Serving(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=512, speculative_config=more)
    found = [f for f in fly(serving) if f.where == "token budget"]
    assert [f.level for f in found] == ([level] if level else [])
    if level == "blocks":
        assert f"{tokens - seqs * (4 if more else 1)} are left to schedule" in found[0].what
        assert "--max-num-batched-tokens" in found[0].fix
        assert "--max-num-seqs" in found[0].fix
        raised = int(found[0].fix.split("--max-num-batched-tokens to ")[1].split(",")[0])
        assert not [f for f in fly(replace(serving, max_num_batched_tokens=raised)) if f.where == "token budget"]


def test_weights_and_both_caches_five_per_cent_over() -> None:
    """D9: the target alone fits, the pair does not; the number, the flag, and a length that does fit."""
    serving = Serving(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=2048, num_speculative_tokens=4)
    n = memory_numbers(model(), model(), CUDA, ROOMY, serving)
    need = sum(n[k] or 0 for k in ("target_weights", "drafter_weights", "kv_one_request", "work"))
    over = Memory(round(need / 0.9 / 1.05), round(need / 0.9 / 1.05))
    (finding,) = blocks(fly(serving, memory=over), "memory")
    assert "both KV caches" in finding.what
    assert "5.0% over" in finding.what
    assert "--gpu-memory-utilization" in finding.fix
    fits = int(finding.fix.split("--max-model-len ")[1].split("`")[0])
    assert 0 < fits < 2048
    assert not blocks(fly(replace(serving, max_model_len=fits), memory=over), "memory")
    enough = Memory(round(need / 0.9) + 10, round(need / 0.9) + 10)
    assert not blocks(fly(serving, memory=enough), "memory")
    alone = fly(serving, memory=over, drafter=model(1, num_hidden_layers=0))
    assert not blocks(alone, "memory")
    bare = Memory(round((need - (n["kv_one_request"] or 0)) / 0.9) + 9, 8 * GIB)
    (finding,) = blocks(fly(serving, memory=bare), "memory")  # the models fit, and not one token of the caches
    assert finding.fix == "no length fits: raise --gpu-memory-utilization"


def test_numbers_of_the_caches() -> None:
    """4 layers x 2 kv heads x 16 x keys and values x 2 bytes; a head is not split over 4 devices."""
    assert kv_bytes_per_token(model(), 2, 1) == 2 * 4 * 2 * 16 * 2
    assert kv_bytes_per_token(model(), 2, 2) == 2 * 4 * 1 * 16 * 2
    assert kv_bytes_per_token(model(), 2, 4) == 2 * 4 * 1 * 16 * 2
    packed = Model(
        CONFIG, {"a": TensorInfo("U8", (100, 1), Path("x"), 100), "b": TensorInfo("F32", (5,), Path("x"), 20)}
    )
    assert weight_bytes(packed, 2) == 110


def test_both_models_are_counted() -> None:
    """D9: memory planned for the target alone is the fault. float32 weights are served in 16 bit on CUDA."""
    serving = Serving(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100, num_speculative_tokens=4)
    n = memory_numbers(model(1000), model(500, num_hidden_layers=1), CUDA, Memory(1000000, 900000), serving)
    token = 2 * 2 * 16 * 2  # keys and values, 2 heads of 16, 2 bytes
    assert (n["target_weights"], n["drafter_weights"]) == (2000, 1000)
    assert n["kv_per_token"] == 4 * token + token
    assert n["kv_one_request"] == 5 * token * 104
    assert n["work"] == 2 * 4 * 1000 * 10
    assert n["kv_space"] == 900000 - 3000 - 80000
    assert n["kv_tokens"] == (900000 - 3000 - 80000) // (5 * token)


def test_cpu_back_end_takes_its_cache_from_the_environment() -> None:
    """1 GiB of cache that the machine has not; and one that is too small for a request."""
    serving = Serving(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=2048, kv_cache_gib=1)
    assert not blocks(fly(serving, CPU, Memory(8 * GIB, 4 * GIB)), "memory")
    (finding,) = blocks(fly(serving, CPU, Memory(8 * GIB, GIB)), "memory")
    assert "VLLM_CPU_KVCACHE_SPACE" in finding.fix
    wide = model(num_hidden_layers=400, num_key_value_heads=4, head_dim=256)
    (finding,) = blocks(fly(serving, CPU, Memory(64 * GIB, 60 * GIB), target=wide), "memory")
    assert "VLLM_CPU_KVCACHE_SPACE gives them 1.00 GiB" in finding.what


def test_less_free_than_the_share_that_is_asked_for() -> None:
    (finding,) = blocks(fly(Serving(max_num_seqs=8, max_model_len=512), memory=Memory(64 * GIB, 32 * GIB)), "memory")
    assert "--gpu-memory-utilization 0.5" in finding.fix


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("tensor_parallel_size", 2, "draft_tensor_parallel_size"),
        ("num_speculative_token", 4, "num_speculative_tokens"),
        ("draft_tensor_parallel", 1, "draft_tensor_parallel_size"),
    ],
)
def test_misnamed_keys(key: str, value: int, right: str) -> None:
    """D9: the right name is said, as vLLM would not until it has loaded."""
    (finding,) = blocks(fly(Serving(speculative_config={key: value}, max_model_len=512)), "speculative config")
    assert f"no key {key}" in finding.what
    assert f"write {right} in its place" in finding.fix


def test_our_keys_are_those_of_the_installed_vllm() -> None:
    """Read from its source: each key we let through is a field there, and the wrong name is one that it refuses."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "config" / "speculative.py").read_text()
    assert [k for k in KEYS if f"\n    {k}: " not in text] == []
    assert "'tensor_parallel_size' is not a valid argument" in text


def test_draft_shards_must_equal_the_targets() -> None:
    one = Serving(tensor_parallel_size=2, speculative_config={"draft_tensor_parallel_size": 1}, max_model_len=512)
    assert blocks(fly(one), "speculative config")
    assert not blocks(fly(replace(one, speculative_config={})), "speculative config")


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        ([[1, 8, 4], [9, 64, 0]], None),
        ([[2, 8, 4]], "starts at 2"),
        ([[1, 8, 4], [8, 9, 2]], "overlaps"),
        ([[1, 8, 5]], "K is 5"),
        ([[1, 8]], "no triple"),
        ([[8, 1, 2]], "ends before"),
        ({"1": 4}, "no list"),
        ([], "no list"),
    ],
)
def test_schedules(schedule: Any, fault: str | None) -> None:
    found = schedule_fault(schedule, 4)
    assert found is None if fault is None else fault in str(found)


@pytest.mark.parametrize("k", [0, -1, "four"])
def test_k(k: Any) -> None:
    assert blocks(
        fly(Serving(speculative_config={"num_speculative_tokens": k}, max_model_len=512)), "speculative config"
    )


def test_the_whole_line() -> None:
    line = shlex.split(serve_line("a b", "d", Serving(max_model_len=512, tensor_parallel_size=2, max_num_seqs=8)))
    assert line[:3] == ["vllm", "serve", "a b"]
    assert line[line.index("--max-model-len") + 1] == "512"
    assert json.loads(line[line.index("--speculative-config") + 1]) == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 2,
    }


def test_report_and_refusal_on_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tiny.folder(tmp_path / "a", positions=2048), tiny.folder(tmp_path / "b", layers=1)
    monkeypatch.setattr(module, "engine", lambda: CPU)
    monkeypatch.setattr(module, "device_memory", lambda backend: Memory(8 * GIB, 6 * GIB))
    t, d = resolve(str(a)), resolve(str(b))
    report = require_start(t, d, Serving(max_model_len=512, max_num_seqs=8, kv_cache_gib=1))
    assert report["starts"]
    assert json.loads(json.dumps(report)) == report
    assert not preflight_report(t, d, Serving(kv_cache_gib=1))["starts"]
    with pytest.raises(InputError, match="serve with `--max-model-len 512`"):
        require_start(t, d, Serving(kv_cache_gib=1))
