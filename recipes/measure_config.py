"""What `draftsmith measure` can be asked for: its keys and their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from recipes.config import Strict


def part_of_one(value: Any) -> Any:
    """A part that is given in percent, as "3%", as a number, 0.03; anything else as it is."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*%\s*", value) if isinstance(value, str) else None
    try:
        return float(found[1]) / 100 if found else value
    except ValueError:
        return value


class WorkloadConfig(Strict):
    answers: Path
    """answers folder of `generate`: its prompts are sent"""
    limit: int = Field(default=16, ge=2)
    """prompts sent; groups keep their shares"""
    max_tokens: int = Field(default=128, ge=1)
    """longest answer; answers end where they end by themselves"""


class SpeculatorConfig(Strict):
    model: Path
    """folder of a checkpoint that drafts from the target's hidden states"""
    method: Literal["auto", "eagle3", "eagle", "medusa", "mlp_speculator"] = "auto"
    """auto: what its config.json says"""
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=32)
    """K of this arm; null: num_speculative_tokens"""


class MeasureConfig(Strict):
    target: str
    """hub id, folder or .gguf file"""
    drafters: dict[str, str] = Field(default_factory=dict)
    """arm name -> drafter folder"""
    speculators: dict[str, SpeculatorConfig] = Field(default_factory=dict)
    """arm name -> head that others trained for this target: EAGLE, EAGLE-3, Medusa"""
    workloads: dict[str, WorkloadConfig]
    """name -> prompts"""
    out: Path
    """run folder: results.jsonl, requests.jsonl, logs"""
    num_speculative_tokens: int = Field(default=4, ge=1, le=32)
    """K, of every arm that drafts"""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """how drafters draw: argmax, or from their distribution"""
    parallel_drafting: Literal["both", "only", "off"] = "both"
    """of drafters that were trained for it: measured both ways, the arm NAME-parallel taking all drafts from one pass"""
    parallel_num_speculative_tokens: int | None = Field(default=None, ge=1, le=32)
    """K of the parallel arms, whose drafts cost less and so may be more; null: num_speculative_tokens"""
    lookup_num_speculative_tokens: int | None = Field(default=None, ge=1, le=32)
    """K of the n-gram and suffix arms, whose drafts cost nothing; null: num_speculative_tokens"""
    synthetic_acceptance_rates: list[Annotated[float, Field(ge=0, le=1)]] | None = Field(
        default=None, min_length=1, max_length=32
    )
    """a self-test, for GPUs: also an arm NAME-synthetic, whose draft i is accepted, with all before it, with the i-th of these
    chances, whatever it is; its τ must be 1 + their sum, its outputs are not the target's"""
    ngram: bool = True
    """measure vLLM's n-gram proposer too"""
    suffix: bool = False
    """measure vLLM's suffix proposer too; needs the package arctic-inference"""
    assisted: bool = False
    """measure assisted generation and prompt lookup in transformers too, offline, beside its own target"""
    arms: list[str] | None = None
    """of the arms that this config makes those to measure, beside the target alone; null: all"""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default=[0.0], min_length=1)
    """of the target's sampling, in every arm"""
    concurrencies: list[Annotated[int, Field(ge=1)]] = Field(default=[1], min_length=1)
    """requests in flight"""
    rates: list[Annotated[float, Field(gt=0)]] = Field(default=[])
    """requests/s that arrive by a Poisson process, whoever is still being answered; one server at a time"""
    repeats: int = Field(default=2, ge=1)
    """times that every prompt is sent to every arm; with `precision` at most so many"""
    minutes: float | None = None
    """begin no further repeat after this long; the first is always finished"""
    precision: Annotated[float, Field(gt=0, lt=1), BeforeValidator(part_of_one)] | None = None
    """begin no further repeat once every speedup's 95 % interval is this narrow: 3% or 0.03 is ± 3 %; also --precision"""
    aa: bool = False
    """serve the target alone a second time: its "speedup" shows the machine's noise"""
    require: list[str] = Field(default_factory=list)
    """what must be met for exit code 0, as "speedup>=1.2@c1" (docs/measure.md); also --require, repeatable"""
    seed: int = 0
    """of sampling"""
    warmup: int = Field(default=2, ge=0)
    """requests to each server before anything is timed"""
    resident: bool | None = None
    """all servers up at once, arms interleaved by prompt; false: one server at a time, interleaved by repeat; null: all at once
    where their memory is free"""
    group_by: str | None = "seen"
    """prompt tag whose values are reported apart"""
    dtype: str = "auto"
    """weights and activations; auto: float32 on the CPU back end, the model's own elsewhere"""
    enforce_eager: bool = False
    """skip compilation, in every arm"""
    max_model_len: int = 1024
    """context of the engine, in tokens"""
    kv_cache_gib: int = 1
    """CPU back end: KV cache of each server"""
    start_timeout_s: float = 900
    """how long a server may take to answer"""
    request_timeout_s: float = Field(default=600, gt=0)
    """how long one whole answer may take; an arm that takes longer is void"""
    record: bool = True
    """write measurements and what to serve with into each drafter's pair.json"""
