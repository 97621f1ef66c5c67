"""Acceptance: from distributions, from a sparse cache (a bracket), and from teacher-forced tokens by replaying rounds.

Shapes: N positions, V vocabulary rows, K ids of the target's head or drafted tokens per round, P prompts.
p is the target's distribution and q the drafter's, both after temperature. Formulas: Leviathan et al. 2022
(arXiv 2211.17192) for α and lossless verification; the replay of rounds is derived here and tested by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def expected_acceptance(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """α = Σ min(p, q) = 1 − TV(p, q) per position [N]: chance that a token drawn from q is accepted."""
    return torch.minimum(p_NV, q_NV).sum(-1)


def argmax_acceptance(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """p(argmax q) per position [N]: what α becomes with argmax drafting, vLLM's default."""
    return p_NV.gather(-1, q_NV.argmax(-1, keepdim=True)).squeeze(-1)


def top1_agreement(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """1[argmax p = argmax q] per position [N]: what α becomes when the target samples greedily."""
    return (p_NV.argmax(-1) == q_NV.argmax(-1)).to(p_NV.dtype)


def acceptance_bracket(
    p_head_NK: torch.Tensor, p_tail_N: torch.Tensor, q_head_NK: torch.Tensor, q_tail_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bound of α per position [N] when p is known exactly on K ids and as one mass elsewhere.

    Σ_H min(p, q) ≤ α ≤ Σ_H min(p, q) + min(p_tail, q_tail). Probabilities, not logs; the head is not renormalised.
    """
    low_N = torch.minimum(p_head_NK, q_head_NK).sum(-1)
    return low_N, low_N + torch.minimum(p_tail_N, q_tail_N)


@dataclass(frozen=True)
class Replay:
    """Rounds of speculative decoding, as vLLM counts them, replayed on known answers. Index j is draft position j+1."""

    at_risk_PK: Floats  # rounds in which draft j was looked at, and its outcome is known or taken as rejected
    accepted_PK: Floats  # those of them in which it was accepted
    cut_PK: Floats  # rounds that had accepted all up to j when the text ended: outcome at j unknown
    rounds_P: Floats  # all rounds
    survival_per_pos: Floats  # [K], unconditional, as vLLM's per-position counters over rounds
    draft_acceptance_rate: float
    acceptance_length: float  # τ = 1 + accepted/rounds, bonus token included
    acceptance_length_low: float  # τ if drafts past the end of the text were never accepted
    acceptance_length_high: float  # τ if they always were


def replay(
    w_per_prompt: Sequence[Sequence[float]],
    num_speculative_tokens: int,
    past_end: Literal["rejected", "alike"] = "rejected",
) -> Replay:
    """Expected counts of the rounds that would produce these answers, for drafts accepted with probability w.

    `w_per_prompt[p][t]` is the chance that the drafter's token at answer position t is accepted given the target's own
    prefix: 0 or 1 at temperature 0 (the walk is then deterministic), min(1, q/p) or 1[x = argmax q] else. As in vLLM,
    the first token comes from prefill, undrafted; a round drafts K, keeps the leading run of a accepted ones and emits
    a + 1.

    The end of the text. vLLM counts what its sampler accepted before it cuts the output at the end token, so a round
    that reaches the end also counts drafts past it, which no answer holds. A last round in which a draft was rejected
    is known whole. One that accepted all that was left is cut: at least that many were accepted. Leaving such rounds
    out would bias τ low (they are the good ones), so `past_end` says how drafts past the end are taken to fare:
    "rejected", as with a drafter distilled on answers alone, which has never seen what follows their end (for the demo's
    drafter this gives vLLM's own counters, draft by draft); "alike", as others at the same draft position (Kaplan-Meier:
    a product of conditionals, each from the rounds whose outcome there is known), as with a drafter that goes on like its
    target. On answers of 35 tokens the two differ by 2-3 % at K = 4 and 6 % at K = 8; `acceptance_length_low/high`
    bracket every case.

    Where no round reaches a position, its conditional is that of the position before it. Without any round τ is nan.
    """
    K = num_speculative_tokens
    rounds = []
    for w in w_per_prompt:
        padded = np.concatenate([np.asarray(w, dtype=np.float64), np.zeros(K)])
        rounds.append(np.lib.stride_tricks.sliding_window_view(padded, K)[: len(w)])
    return replay_rounds(rounds, K, past_end)


def replay_rounds(
    w_per_prompt: Sequence[NDArray[Any]],
    num_speculative_tokens: int,
    past_end: Literal["rejected", "alike"] = "rejected",
) -> Replay:
    """`replay` where a draft depends on where its round began: `w_per_prompt[p][s, j]` [T, ≥ K] is the chance that draft j of a
    round that starts with s answer tokens known, so the one for answer position s + j, is accepted if those before it were.

    A drafter that writes all K at once sees the s tokens and none of its own drafts; one that drafts one by one sees, as long as
    it is accepted, the text itself: then w[s, j] is the w of position s + j.
    """
    K = num_speculative_tokens
    n_P = np.array([len(w) for w in w_per_prompt], dtype=np.int64)
    P, T = len(n_P), int(n_P.max(initial=0))
    w_PTK = np.zeros((P, T, K))
    for p, w in enumerate(w_per_prompt):
        w_PTK[p, : len(w)] = w[:, :K]
    visit_PS = np.zeros((P, T + K + 2))  # chance that a round starts with s answer tokens known
    visit_PS[:, 1] = 1.0
    at_risk, accepted, cut, rounds = np.zeros((P, K)), np.zeros((P, K)), np.zeros((P, K)), np.zeros(P)
    for s in range(1, T):
        run_P = visit_PS[:, s] * (s < n_P)
        rounds += run_P
        for j in range(K):
            known_P = s + j < n_P
            cut[:, j:] += (run_P * ~known_P)[:, None]
            if past_end == "rejected":
                at_risk[:, j] += run_P * ~known_P
            run_P = run_P * known_P
            ok_P = run_P * w_PTK[:, s, j]
            at_risk[:, j] += run_P
            accepted[:, j] += ok_P
            visit_PS[:, s + j + 1] += run_P - ok_P  # j accepted and the target's own token
            run_P = ok_P
        visit_PS[:, s + K + 1] += run_P  # all accepted and the bonus token
    survival = _survival(at_risk.sum(0), accepted.sum(0))
    total = rounds.sum()
    tau = 1 + float(survival.sum()) if total else float("nan")
    low = 1 + float(accepted.sum() / total) if total else float("nan")
    high = 1 + float((accepted.sum() + cut.sum()) / total) if total else float("nan")
    return Replay(at_risk, accepted, cut, rounds, survival, (tau - 1) / K, tau, low, high)


def _survival(at_risk_xK: Floats, accepted_xK: Floats) -> Floats:
    """Π of conditionals along the last axis; an unseen position takes the conditional before it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional = np.where(at_risk_xK > 0, accepted_xK / at_risk_xK, np.nan)
    for j in range(conditional.shape[-1]):
        before = conditional[..., j - 1] if j else np.zeros_like(conditional[..., 0])
        conditional[..., j] = np.where(np.isnan(conditional[..., j]), before, conditional[..., j])
    return np.asarray(np.cumprod(conditional, axis=-1))


def acceptance_length_of(replayed: Replay, weights_RP: Floats) -> Floats:
    """τ [R] when prompt p counts `weights_RP[r, p]` times: the statistic for `pairing.bootstrap.interval`."""
    survival_RK = _survival(weights_RP @ replayed.at_risk_PK, weights_RP @ replayed.accepted_PK)
    return np.asarray(1 + survival_RK.sum(-1))


def uniform_starts(
    w_per_prompt: Sequence[Sequence[float]],
    num_speculative_tokens: int,
    a_per_prompt: Sequence[Sequence[float]] | None = None,
) -> float:
    """τ = 1 + Σ_j E[Π_{i<j} w_{t+i−1} · a_{t+j−1}], exact, over every start t that has K known tokens after it.

    `a` is the expected acceptance at a position (α, lower variance than w); without it w stands for both, as at
    temperature 0. Rounds really start where the last one ended, so this differs from `replay` where acceptance
    clusters. nan where no answer is longer than K.
    """
    K = num_speculative_tokens
    sums, starts = np.zeros(K), 0
    for w, a in zip(w_per_prompt, a_per_prompt or w_per_prompt, strict=True):
        if len(w) <= K:
            continue
        windows_SK = np.lib.stride_tricks.sliding_window_view(np.asarray(w[1:], dtype=np.float64), K)
        ends_SK = np.lib.stride_tricks.sliding_window_view(np.asarray(a[1:], dtype=np.float64), K)
        before_SK = np.ones_like(windows_SK)
        before_SK[:, 1:] = np.cumprod(windows_SK, axis=1)[:, :-1]
        sums += (before_SK * ends_SK).sum(0)
        starts += len(windows_SK)
    return 1 + float(sums.sum() / starts) if starts else float("nan")
