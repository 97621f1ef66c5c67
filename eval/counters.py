"""vLLM's own speculation counters: two scrapes of /metrics, their difference, and the rates that follow from it.

Counters run since the server started, one series per engine (label `engine`): only the difference of two scrapes,
summed over engines, belongs to a measurement (fault D22). Names are those of vLLM 0.32
(`v1/spec_decode/metrics.py`, `v1/metrics/loggers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pairing.errors import PartFailedError

# Ours -> the sample's name in the exposition. `<name>_created` samples hold a start time, never a count.
SERIES = {
    "num_drafts": "vllm:spec_decode_num_drafts_total",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
_OURS = {sample: ours for ours, sample in SERIES.items()}
_CREATED = {sample.removesuffix("_total") + "_created": ours for ours, sample in SERIES.items()}

Key = tuple[str, str, int]  # our name, "<model_name>/<engine>", draft position (-1 where the series has none)


@dataclass(frozen=True)
class Scrape:
    """One reading of /metrics: each series apart, so that a reset of one engine can't hide in the sum of all."""

    values: dict[Key, float]
    created: dict[Key, float]
    """When each series began (seconds since the epoch), where the exposition says it: a later one is a restart."""


@dataclass(frozen=True)
class Counts:
    """What happened between two scrapes, all engines together. Rates are None where nothing was counted, never 0/0."""

    num_drafts: int
    """Rounds that had at least one drafted token (vLLM counts no round where the proposer found nothing)."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    """[K]: rounds in which the draft's tokens up to and including this position were all accepted."""
    generation_tokens: int
    prompt_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens. It falls as K grows though the drafter is the same: compare at equal K only."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """τ = 1 + accepted / rounds: tokens a round emits, the target's own (bonus) token included, as vLLM logs it."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def survival_per_pos(self) -> list[float] | None:
        """[K]: unconditional: share of all rounds that still stood at each position."""
        if not self.num_drafts:
            return None
        return [n / self.num_drafts for n in self.num_accepted_tokens_per_pos]

    @property
    def conditional_per_pos(self) -> list[float | None] | None:
        """[K]: of the rounds that stood at the position before, the share accepted here; None where none stood."""
        if not self.num_drafts:
            return None
        before = (self.num_drafts, *self.num_accepted_tokens_per_pos[:-1])
        return [n / b if b else None for n, b in zip(self.num_accepted_tokens_per_pos, before, strict=False)]

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Hits / queries in tokens: above 1 % a cell measured the cache, not the engine (fault D20)."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else None


def parse(text: str) -> Scrape:
    """Reads Prometheus text. Raises PartFailedError where it is none, or holds no counter of vLLM's."""
    values: dict[Key, float] = {}
    created: dict[Key, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                ours = _OURS.get(sample.name) or _CREATED.get(sample.name)
                if ours is None:
                    continue
                engine = f"{sample.labels.get('model_name', '')}/{sample.labels.get('engine', '0')}"
                key = (ours, engine, int(sample.labels.get("position", -1)))
                into = values if sample.name in _OURS else created
                into[key] = sample.value if into is created else into.get(key, 0.0) + sample.value
    except ValueError as e:
        raise PartFailedError(f"/metrics: not Prometheus text ({' '.join(str(e).split())})") from None
    if not any(name == "generation_tokens" for name, _, _ in values):
        raise PartFailedError(f"/metrics: no {SERIES['generation_tokens']}: is this vLLM, with its stats logged?")
    return Scrape(values, created)


def difference(before: Scrape, after: Scrape) -> Counts:
    """What was counted from `before` to `after`.

    Raises PartFailedError where a series went back, vanished or began anew (the engine restarted in between), and where
    the counters contradict each other (more accepted than drafted): such a cell is void, never a figure.
    """
    sums: dict[tuple[str, int], float] = {}
    for key, old in before.values.items():
        name, engine, _ = key
        new = after.values.get(key)
        if new is None or new < old:
            now = "nothing" if new is None else f"{new:g}"
            raise PartFailedError(
                f"{SERIES[name]} of engine {engine} went from {old:g} to {now} "
                "between two scrapes: the engine restarted, this measurement is void"
            )
        if key in before.created and after.created.get(key, before.created[key]) > before.created[key]:
            raise PartFailedError(
                f"{SERIES[name]} of engine {engine} began anew between two scrapes: the engine restarted, "
                "this measurement is void"
            )
    for key, new in after.values.items():  # a series that is new counts from 0
        name, _, position = key
        sums[name, position] = sums.get((name, position), 0.0) + new - before.values.get(key, 0.0)

    def total(name: str) -> int:
        return round(sums.get((name, -1), 0.0))

    positions = sorted(p for name, p in sums if name == "num_accepted_tokens_per_pos")
    per_pos = tuple(round(sums["num_accepted_tokens_per_pos", p]) for p in positions)
    counts = Counts(
        num_drafts=total("num_drafts"),
        num_draft_tokens=total("num_draft_tokens"),
        num_accepted_tokens=total("num_accepted_tokens"),
        num_accepted_tokens_per_pos=per_pos,
        generation_tokens=total("generation_tokens"),
        prompt_tokens=total("prompt_tokens"),
        prefix_cache_queries=total("prefix_cache_queries"),
        prefix_cache_hits=total("prefix_cache_hits"),
        preemptions=total("preemptions"),
    )
    if counts.num_accepted_tokens > counts.num_draft_tokens or (per_pos and max(per_pos) > counts.num_drafts):
        raise PartFailedError(
            f"the engine counted {counts.num_accepted_tokens} accepted of {counts.num_draft_tokens} drafted tokens in "
            f"{counts.num_drafts} rounds, per position {list(per_pos)}: impossible, so this measurement is void"
        )
    if per_pos and sum(per_pos) != counts.num_accepted_tokens:
        raise PartFailedError(
            f"the engine's accepted tokens per position {list(per_pos)} add up to {sum(per_pos)}, not to its total of "
            f"{counts.num_accepted_tokens}: scraped while requests ran? Drain first; this measurement is void"
        )
    return counts
