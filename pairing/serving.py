"""What serving a pair meets: positions as the engine counts them, windows, layers, shards, the installed vLLM.

The rules are those of vLLM 0.32's config (`_get_and_verify_max_len`, `verify_with_parallel_config`), read there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pairing.engine import ATTENTION, bitsandbytes_advice, draftable, engine, layer_kinds
from pairing.finding import Finding
from pairing.four_bit import four_bit_shards

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
# These write the scaled length as max_position_embeddings already; every other type multiplies it by its factor.
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config; the config itself otherwise."""
    return dict(config.get("text_config", config))


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json as `--hf-overrides` leaves it: nested groups are merged, values replaced."""
    merged = dict(config)
    for key, value in (overrides or {}).items():
        old = merged.get(key)
        merged[key] = overridden(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary scaling, {} where there is none; of a config with one per layer type, the full attention's."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return dict(rope.get("full_attention") or rope)


def context(config: Mapping[str, Any]) -> int | None:
    """Positions that the model takes, as vLLM counts them; None where the config says nothing."""
    length = min((config[k] for k in LENGTHS if config.get(k)), default=None)
    rope = scaling(config)
    if length is None or str(config.get("model_type", "")).startswith("gemma3"):  # its length is the scaled one
        return length
    kind = rope.get("rope_type", rope.get("type"))
    return int(length * (1.0 if kind in SCALED_ALREADY else float(rope.get("factor") or 1)))


def served_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that vLLM takes where no flag says: those of `context`; of LongRoPE the shorter ones that it was trained on
    before it was scaled (`_get_and_verify_max_len`, "to avoid performance degradation for shorter sequences")."""
    length, rope = context(config), scaling(config)
    if length is None or rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return length
    # Phi-3's class has this value by itself, and transformers does not write out what a class has by itself
    first = config.get("original_max_position_embeddings", 4096 if config.get("model_type") == "phi3" else None)
    return int(first or length)


def window(config: Mapping[str, Any]) -> int | None:
    """The sliding window that the layers attend within; None where it is off."""
    on = config.get("use_sliding_window", True)
    return config.get("sliding_window") or None if on else None


def compare_context(
    target: Mapping[str, Any], drafter: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> list[Finding]:
    """D6: past the drafter's last position vLLM fails or drafts noise, so both must be held to the shorter one.

    `target` and `drafter` are text configs, the target's with `overrides` in it already.
    """
    findings = []
    t, d = context(target), context(drafter)
    if t is not None and d is not None:
        if d < t:
            findings.append(
                Finding(
                    "warns",
                    f"the drafter takes {d} positions, the target {t}",
                    "context",
                    f"serve with `--max-model-len {d}`: prompt and answer together then end at {d} tokens, not at {t}",
                )
            )
        else:
            findings.append(Finding("info", f"the target takes {t} positions, the drafter {d}", "context", ""))
    rope, drafted = (_rope_words(scaling(c)) for c in (target, drafter))
    if rope != drafted:
        reached = "; --hf-overrides reaches the target only" if overrides else ""
        findings.append(
            Finding(
                "warns" if overrides else "info",
                f"rotary scaling as served is {rope} in the target, {drafted} in the drafter{reached}",
                "context",
                "write it into the drafter's config.json too if the drafter was cut from this target, then measure"
                if overrides
                else "",
            )
        )
    mine, theirs = window(drafter), window(target)
    if mine is not None and mine != theirs and mine < (t or d or mine + 1):
        findings.append(
            Finding(
                "warns",
                f"the drafter attends to the last {mine} tokens only, the target to "
                f"{f'the last {theirs}' if theirs else 'all'}",
                "context",
                f"expect less acceptance past {mine} tokens: measure there",
            )
        )
    return findings


def _rope_words(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type")) or "default"
    return "none" if kind == "default" and not rope.get("factor") else f"{kind} by {rope.get('factor', 1)}"


def stateful(config: Mapping[str, Any]) -> bool:
    """Whether some layer keeps a state in place of keys and values; False where transformers does not know the type."""
    try:
        return any(kind not in ATTENTION for kind in layer_kinds(dict(config)))
    except ValueError:
        return False


def shard_findings(config: Mapping[str, Any], role: str, tensor_parallel_size: int) -> list[Finding]:
    """What does not divide over `tensor_parallel_size` devices. The drafter is split as the target is."""
    n = tensor_parallel_size
    if n == 1:
        return []
    text = text_config(config)
    heads = int(text.get("num_attention_heads") or 0)
    kv = int(text.get("num_key_value_heads") or heads)
    ffn = int(text.get("intermediate_size") or text.get("ffn_dim") or 0)
    padded = -(-int(text.get("vocab_size") or 0) // 64) * 64  # vLLM pads the rows to 64 before it splits them
    faults = [f"{count} {what}" for what, count in (("attention heads", heads), ("FFN channels", ffn)) if count % n]
    if kv and kv % n and n % kv:
        faults.append(f"{kv} key/value heads")
    if padded % n:
        faults.append(f"{padded} vocabulary rows (padded to 64)")
    findings = []
    if faults:
        findings.append(
            Finding(
                "blocks",
                f"the {role} does not divide over {n} devices: {', '.join(faults)}",
                "shards",
                f"choose a --tensor-parallel-size that divides them; "
                f"{'the drafter is split as the target is' if role == 'drafter' else 'it is the target that sets it'}",
                stops=("vllm",),
            )
        )
    return findings + four_bit_shards(role, config, n)


def engine_findings(target: Mapping[str, Any], drafter: Mapping[str, Any]) -> list[Finding]:
    """What vLLM would refuse or do differently with this pair, from both config.json (faults D7, D8, D18)."""
    findings = []
    for reason in draftable(dict(drafter)):
        stateful = "no attention" in reason  # a state cannot be cut back to the accepted tokens
        findings.append(
            Finding(
                "blocks",
                f"no drafter for vLLM: {reason}",
                "layers",
                "choose layers of one kind, or another drafter",
                stops=("vllm", "transformers", "universal") if stateful else ("vllm",),
            )
        )
    if "vision_config" in target or "audio_config" in target:
        findings.append(
            Finding(
                "warns",
                "the target is multimodal: vLLM drafts from its text only",
                "layers",
                "measure on text requests; expect little on the others",
            )
        )
    try:
        kinds = layer_kinds(dict(target))
    except ValueError as e:
        kinds = []
        findings.append(Finding("warns", f"the target's {e}", "layers", "update transformers"))
    if other := sorted({kind for kind in kinds if kind not in ATTENTION}):
        findings.append(
            Finding(
                "warns",
                f"the target has layers that are no attention ({', '.join(other)}): we know of no vLLM that was tried "
                "with a draft model beside them",
                "layers",
                "start the pair once before training (`draftsmith serve`)",
            )
        )
    elif len(set(kinds)) > 1:
        findings.append(
            Finding(
                "warns",
                f"the target mixes layer types ({', '.join(sorted(set(kinds)))}): vLLM may split the drafter's layers "
                "over several KV-cache groups and refuse to start",
                "layers",
                "start the pair once before training (`draftsmith serve`)",
            )
        )
    quantized = drafter.get("quantization_config") or {}
    if quantized.get("quant_method") == "bitsandbytes" and (found := engine()):
        advice = bitsandbytes_advice(found.version, found.bitsandbytes_plugin)
        if advice:
            findings.append(Finding("warns", "this vLLM does not read the 4-bit drafter yet", "engine", advice))
    return findings
