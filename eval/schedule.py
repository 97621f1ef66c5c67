"""K by batch size, as vLLM's `num_speculative_tokens_per_batch_size` takes it, from what was measured (fault D25).

The order of caution: speculate only where it was measured to be faster; of two K that can't be told apart take the smaller,
which wastes less when more requests come; where nothing was measured assume no more than the sizes around it showed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

Ratio = tuple[float, float, float]  # speed of one arm over another's, with its interval: (ratio, low, high)
Schedule = list[list[int]]  # [from, to, K], batch sizes inclusive, the first from 1, each next to the one before


def winner(pairs: Mapping[tuple[int, int], Ratio]) -> int:
    """The K to use at one batch size; 0 is the target alone.

    pairs: (K, k) with K > k -> speed at K over speed at k on the same prompts; what is missing was not measured. A larger K
    takes the place of a smaller one only where it is measurably faster than that one and than none: interval above 1.
    """
    best = 0
    for k in sorted({larger for larger, _ in pairs}):
        against = [pairs.get((k, 0)), pairs.get((k, best))]
        if all(ratio is not None and ratio[1] > 1.0 for ratio in against):
            best = k
    return best


def filled(best: Mapping[int, int], max_num_seqs: int) -> Schedule:
    """The schedule from 1 to `max_num_seqs` by the best K at each measured batch size.

    Between two measured sizes the smaller K of both; below the smallest its K, since a smaller batch leaves more of the
    machine idle for verifying; above the largest 0, since speculation pays less the fuller the batch. vLLM by itself would
    carry the last K on into every gap.
    """
    sizes = sorted(best)

    def k(size: int) -> int:
        below = [s for s in sizes if s <= size][-1:]
        above = [s for s in sizes if s >= size][:1]
        return min((best[s] for s in below + above), default=0) if above else 0

    runs = [(k_, list(run)) for k_, run in groupby(range(1, max_num_seqs + 1), key=k)]
    return [[run[0], run[-1], k_] for k_, run in runs]


def gaps(measured: Sequence[int], max_num_seqs: int) -> list[tuple[int, int]]:
    """The ranges of batch sizes up to `max_num_seqs` that no cell was measured at."""
    missing = [size for size in range(1, max_num_seqs + 1) if size not in measured]
    runs = [[s for _, s in run] for _, run in groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0])]
    return [(run[0], run[-1]) for run in runs]


def k_at(schedule: Sequence[Sequence[int]], size: int) -> int:
    """K at a batch size; beyond the last range its K, as vLLM carries it on."""
    return next((k for low, high, k in schedule if low <= size <= high), schedule[-1][2])


def extended(schedule: Sequence[Sequence[int]], max_num_seqs: int) -> Schedule:
    """The same for a larger `max_num_seqs`: K = 0 for what was not measured."""
    end = schedule[-1][1]
    return [*map(list, schedule), *([[end + 1, max_num_seqs, 0]] if max_num_seqs > end else [])]


def engine_lookup(schedule: Schedule, max_num_seqs: int) -> list[int] | None:
    """K for the batch sizes 1 … max_num_seqs as the installed vLLM reads `schedule`: its own checker and table.

    None where this vLLM has no such table. Raises ValueError, in vLLM's words, where it refuses the schedule.
    """
    try:
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
    except ImportError:
        return None
    return list(build_dynamic_sd_schedule_lookup(schedule, max_num_seqs, max(1, *(k for _, _, k in schedule))))[1:]


def ignored(schedule: Sequence[Sequence[int]], size: int, drafted_per_round: float) -> bool | None:
    """Whether the runner drafted num_speculative_tokens (the schedule's largest K) a round whatever the batch size.

    `size` requests were in flight; rounds without a draft count. None where the schedule asks for the largest K there
    anyway. When the last requests of a cell run out the batch is smaller and K may be larger, so only a figure at the
    largest K itself says that the schedule was ignored.
    """
    most = max(k for _, _, k in schedule)
    return None if k_at(schedule, size) == most else drafted_per_round > most - 0.1
