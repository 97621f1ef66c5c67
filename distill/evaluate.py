"""Held-out evaluation on the target's own text: agreement, α's bracket, τ by replay; before against after, in pairs.

A row with several answers is one prompt: rounds never run from one answer into the next, and the bootstrap draws whole rows.
Shapes: P prompts, R bootstrap resamples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from distill.batches import Batch, Ints, Rows, answer_lengths, collate, tags
from distill.head import Head, head_scores
from distill.objective import DraftSampling
from distill.options import decoder_autocast
from distill.student import supervised_hidden
from pairing.acceptance import Replay, acceptance_length_of, replay
from pairing.bootstrap import interval
from pairing.errors import PartFailedError

LENGTHS = range(1, 9)  # K for which τ is given
COMPARED_K = 4
Found = TypeVar("Found")
MOST_GROUPS = 8  # a tag with more values than this names prompts rather than groups
By = Literal["accepted", "ratio"]  # the field of a score that holds w


def told_by(rows: Rows, draft_sample_method: DraftSampling) -> By | None:
    """What w, the chance that a draft is accepted, is on these answers where drafts are chosen like that; None: not to be had.

    Argmax drafting: 1[argmax q = answer token], at whatever temperature the answers were drawn; at temperature 0 vLLM drafts so
    in any case. Drafts drawn from q: min(1, q/p) at the answer token, both at the answers' temperature (Leviathan et al. 2022);
    the recorded log-probs are at 1, and those at another do not follow from them.
    """
    if draft_sample_method == "greedy" or rows.temperature == 0:
        return "accepted"
    return "ratio" if rows.temperature == 1 else None


def drafting(rows: Rows, draft_sample_method: DraftSampling) -> dict[str, Any]:
    """Whose τ the figures on these answers give: {"draft_sample_method", "temperature", "note": None, or why there is none}."""
    note = (
        f"τ of drafts that are drawn is not known: these answers were drawn at temperature {rows.temperature:g}, and what was "
        "recorded is the distribution at 1 (answers generated at 1 give it for 1)"
    )
    known = told_by(rows, draft_sample_method) is not None
    said = {"draft_sample_method": draft_sample_method, "temperature": rows.temperature}
    return said | {"note": None if known else note}


@dataclass(frozen=True)
class PromptScore:
    """One held-out prompt: sums over its answers' tokens, and each token's acceptance by both ways of choosing drafts."""

    id: str
    tags: dict[str, Any]
    tokens: int
    top1: float
    alpha_low: float
    alpha_high: float
    accepted: list[list[int]]  # of each answer: 1 where the drafter's argmax is the answer token
    ratio: list[list[float]] = field(default_factory=list)  # of each answer: min(1, q/p) at its token
    by: By | None = "accepted"  # which of the two is w as the drafter is served: see `told_by`

    @property
    def w(self) -> Sequence[Sequence[float]]:
        """The chance that the draft at each token of each answer is accepted; nothing where it is not known."""
        return [] if self.by is None else self.ratio if self.by == "ratio" else self.accepted


def score_prompts(
    accelerator: Accelerator,
    model: Any,
    rows: Rows,
    *,
    batch_size: int,
    chunk: int | None = None,
    block: int = Head.block,
    most: int | None = None,
    draft_sample_method: DraftSampling = "greedy",
    where: str = "evaluation",
) -> list[PromptScore]:
    """Scores the first `most` prompts (None: all), shared out over the ranks and gathered; in the rows' order. τ of what follows
    from them is that of a drafter served with `draft_sample_method`. Raises PartFailedError, on every rank, naming `where` and
    the prompt, where a figure is not finite."""
    head, weight = Head(rows.real, chunk, block), model.get_output_embeddings().weight
    by = told_by(rows, draft_sample_method)

    def score(batch: Batch, piece: Ints) -> list[PromptScore]:
        with decoder_autocast(accelerator.device, accelerator.mixed_precision == "bf16"):
            hidden = supervised_hidden(model, batch)
        scores = head_scores(hidden, weight, batch.signal, head)
        sums = (scores.top1_N, scores.alpha_low_N, scores.alpha_high_N)
        columns = torch.stack([*sums, scores.accepted_N, scores.ratio_N]).cpu()
        found = []
        for b, i in enumerate(piece):
            top1, low, high, accepted, ratio = columns[:, (batch.row_N == b).cpu()]
            lengths = answer_lengths(rows, int(i))
            found.append(
                PromptScore(
                    id=batch.ids[b],
                    tags=tags(rows, int(i)),
                    tokens=len(top1),
                    top1=float(top1.double().sum()),
                    alpha_low=float(low.double().sum()),
                    alpha_high=float(high.double().sum()),
                    accepted=[w.tolist() for w in accepted.int().split(lengths)],
                    ratio=[w.tolist() for w in ratio.split(lengths)],
                    by=by,
                )
            )
        return found

    scores = in_order(accelerator, model, rows, batch_size, most, score)
    for s in scores:
        require_finite(where, s.id, [s.alpha_low, s.alpha_high, *chain.from_iterable(s.ratio)])
    return scores


def require_finite(where: str, prompt: str, figures: Sequence[float] | NDArray[Any]) -> None:
    """Raises PartFailedError where one of a prompt's figures is NaN or infinite: what a training that diverged, or a damaged
    weight, gives. Asked of what was gathered, so that no rank waits for one that has stopped."""
    if not np.isfinite(figures).all():
        raise PartFailedError(
            f"{where}: the drafter gives figures that are not finite on prompt {prompt}; what was saved before, checkpoints too, "
            "is as it was: lower lr, or look at the draft's weights and at that prompt"
        )


def in_order(
    accelerator: Accelerator,
    model: Any,
    rows: Rows,
    batch_size: int,
    most: int | None,
    score: Callable[[Batch, Ints], list[Found]],
) -> list[Found]:
    """`score` of batches of the first `most` prompts, `model` in evaluation mode and without gradient; gathered from all
    ranks, in the rows' order."""
    training = model.training
    model.eval()
    indices = np.flatnonzero(rows.supervised_P > 0)[:most]
    by_length = indices[np.argsort(rows.tokens_P[indices], kind="stable")]
    pieces = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    mine: list[tuple[int, Found]] = []
    with torch.no_grad():
        for piece in pieces[accelerator.process_index :: accelerator.num_processes]:
            found = score(collate(rows, piece, accelerator.device), piece)
            mine += [(int(i), one) for i, one in zip(piece, found, strict=True)]
    model.train(training)
    return [one for _, one in sorted(gather_object(mine), key=lambda pair: pair[0])]


def summary(scores: Sequence[PromptScore]) -> dict[str, Any]:
    """Token means of top-1 agreement and of α's bracket, and τ for each K: null without any round or known w."""
    tokens = sum(s.tokens for s in scores)
    tau = {K: replay([w for s in scores for w in s.w], K).acceptance_length for K in LENGTHS}
    return {
        "top1": sum(s.top1 for s in scores) / tokens,
        "alpha_low": sum(s.alpha_low for s in scores) / tokens,
        "alpha_high": sum(s.alpha_high for s in scores) / tokens,
        "tau": {str(K): _figure(t) for K, t in tau.items()},
    }


def replay_prompts(w_per_prompt: Sequence[Sequence[Sequence[float]]], num_speculative_tokens: int) -> Replay:
    """`replay` of every answer by itself, its counts [P, K] summed over the answers of a prompt, for the bootstrap."""
    one = replay([w for answers in w_per_prompt for w in answers], num_speculative_tokens)
    owner = np.repeat(np.arange(len(w_per_prompt)), [len(answers) for answers in w_per_prompt])

    def by_prompt(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.zeros((len(w_per_prompt), *counts.shape[1:]))
        np.add.at(sums, owner, counts)
        return sums

    return replace(
        one,
        at_risk_PK=by_prompt(one.at_risk_PK),
        accepted_PK=by_prompt(one.accepted_PK),
        cut_PK=by_prompt(one.cut_PK),
        rounds_P=by_prompt(one.rounds_P),
    )


def compare(before: Sequence[PromptScore], after: Sequence[PromptScore]) -> dict[str, Any]:
    """Both summaries, the change of top-1 and of τ at K = 4 with its paired interval, and the groups by tag."""
    top1, tau = changes(before, after, COMPARED_K)
    return {
        "prompts": len(after),
        "tokens": sum(s.tokens for s in after),
        "before": summary(before),
        "after": summary(after),
        "change": {"top1": top1, "tau_4": tau},
        "groups": groups(after),
    }


Change = list[
    float | None
]  # of a figure, and its 95 % interval, prompts paired; None where there is nothing to tell from


def changes(
    before: Sequence[PromptScore], after: Sequence[PromptScore], num_speculative_tokens: int
) -> tuple[Change, Change]:
    """The change of top-1 agreement, and that of τ by replay at that K."""
    assert [s.id for s in before] == [s.id for s in after]
    tokens_P = np.array([s.tokens for s in after], dtype=np.float64)
    gain_P = np.array([a.top1 - b.top1 for a, b in zip(after, before, strict=True)])
    old, new = (replay_prompts([s.w for s in scores], num_speculative_tokens) for scores in (before, after))

    def tau_change(w_RP: NDArray[np.float64]) -> NDArray[np.float64]:
        return acceptance_length_of(new, w_RP) - acceptance_length_of(old, w_RP)

    top1 = interval(lambda w_RP: (w_RP @ gain_P) / (w_RP @ tokens_P), len(after))
    tau = interval(tau_change, len(after)) if new.rounds_P.any() else (np.nan, np.nan)
    return (
        [float(gain_P.sum() / tokens_P.sum()), *map(_figure, top1)],
        [_figure(new.acceptance_length - old.acceptance_length), *map(_figure, tau)],
    )


def acceptance(
    scores: Sequence[PromptScore], num_speculative_tokens: int, other: Sequence[PromptScore] | None = None
) -> dict[str, Any]:
    """{"top1", "alpha" (its bracket), "tau" by replay at that K, "top1_change", "tau_change"}; the changes are those from
    `other`, None where there is none."""
    own = summary(scores)
    tau = replay_prompts([s.w for s in scores], num_speculative_tokens).acceptance_length
    top1_change, tau_change = changes(other, scores, num_speculative_tokens) if other is not None else (None, None)
    return {
        "top1": own["top1"],
        "alpha": [own["alpha_low"], own["alpha_high"]],
        "tau": _figure(tau),
        "top1_change": top1_change,
        "tau_change": tau_change,
    }


def groups(scores: Sequence[PromptScore]) -> dict[str, dict[str, Any]]:
    """A summary per value of each tag that parts the prompts in 2 to 8 groups."""
    result: dict[str, dict[str, Any]] = {}
    for tag in sorted({t for s in scores for t in s.tags}):
        parts: dict[str, list[PromptScore]] = {}
        for s in scores:
            value = s.tags.get(tag)
            parts.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(s)
        if 2 <= len(parts) <= MOST_GROUPS:
            result[tag] = {v: {"prompts": len(p)} | summary(p) for v, p in sorted(parts.items())}
    return result


def verdict(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence: what changed measurably on which set, or that nothing did (fault D15)."""
    if not sets:
        return "not evaluated: no held-out set was given, so nothing is known of what training changed"
    said = []
    for name, result in sets.items():
        for what, (point, low, high), (before, after) in _figures(result):
            if point is None or low is None or high is None or low <= 0 <= high:
                continue
            moved = "rose" if point > 0 else "FELL"
            change = f"(95 % interval of the change {low:+.3f} to {high:+.3f})"
            said.append(f"{what} on {name} {moved} from {before:.3f} to {after:.3f} {change}")
    if not said:
        said = ["no measurable change: on every held-out set the 95 % interval of the change holds 0"]
    notes = {name: (result.get("drafting") or {}).get("note") for name, result in sets.items()}
    return "; ".join([*said, *(f"on {name}, {note}" for name, note in notes.items() if note)])


def _figures(result: Mapping[str, Any]) -> list[tuple[str, Change, list[Any]]]:
    """What a verdict speaks of: each figure in words, its change, and what it was before and after."""
    both = [result["before"], result["after"]]
    found = [("top-1 agreement", result["change"]["top1"], [one["top1"] for one in both])]
    found += [("acceptance length at K=4", result["change"]["tau_4"], [one["tau"]["4"] for one in both])]
    if rounds := result.get("parallel"):  # of a drafter that also writes all its drafts in one pass
        K = str(rounds["num_speculative_tokens"])
        taus = [rounds[when]["tau"][K] for when in ("before", "after")]
        found += [(f"acceptance length at K={K}, all drafts in one pass,", rounds["change"], taus)]
    return found


def verdict_of_copy(sets: Mapping[str, Mapping[str, Any]]) -> str:
    """What 4 bits cost the trained drafter, to go behind `verdict`'s sentence; empty where no quantizer was in training."""
    said = ""
    for name, result in sets.items():
        if copy := result.get("quantized"):
            point, low, high = copy["change"]["top1"]
            within = f" (95 % interval {low:+.3f} to {high:+.3f})" if low is not None else ""
            top1 = f"top-1 agreement {copy['after']['top1']:.3f} on {name}"
            said += f"; its 4-bit copy has {top1}, {point:+.3f} from its own{within}"
    return said


def _figure(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
