"""What is minimised: functions of per-position log-probabilities, one line each in a literal dict.

A loss sees a position's `Outcomes`: the next tokens as far as the target's signal knows them. Online these are all V ids;
from the cache they are the head's K ids and either one bucket for all others, or M ids that were drawn from them. All
losses here are of the form E_p[h(q/p)] or made of such means, so one function serves the three cases. The head is never
renormalised: at the optimum of a renormalised loss α is only the head's mass (design notes, "Sparse cache").

Shapes: N positions, X outcomes of a position, V vocabulary rows, K ids of the head, M draws from outside it, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Signal:
    """The target at N positions from the cache, at temperature 1."""

    answer_N: torch.Tensor  # int64, the token that the target wrote
    head_ids_NK: torch.Tensor  # int64, its K most likely ids, most likely first
    head_logp_NK: torch.Tensor  # float32, their log-probabilities
    tail_N: torch.Tensor  # float32, the mass of all other ids
    tail_ids_NM: torch.Tensor | None = None  # int64, ids drawn from the target outside its head, with replacement
    tail_logp_NM: torch.Tensor | None = None  # float32, their log-probabilities, not conditional on the tail

    def __getitem__(self, at: slice | torch.Tensor) -> Signal:
        tail_ids = None if self.tail_ids_NM is None else self.tail_ids_NM[at]
        tail_logp = None if self.tail_logp_NM is None else self.tail_logp_NM[at]
        return Signal(
            self.answer_N[at], self.head_ids_NK[at], self.head_logp_NK[at], self.tail_N[at], tail_ids, tail_logp
        )


@dataclass(frozen=True)
class FullSignal:
    """The target at N positions from the model itself: its distribution is softmax(hidden · headᵀ / temperature)."""

    answer_N: torch.Tensor
    hidden_NH: torch.Tensor  # the target's last hidden states; its width H is its own
    weight_VH: torch.Tensor  # the target's head
    temperature: float = 1.0

    def __getitem__(self, at: slice | torch.Tensor) -> FullSignal:
        return replace(self, answer_N=self.answer_N[at], hidden_NH=self.hidden_NH[at])


@dataclass(frozen=True)
class Outcomes:
    """N positions, X known outcomes of each. `mass` is the target's probability that an outcome stands for: its own p, or
    for one of M draws p_tail / M; so Σ_X mass · f is E_p[f], estimated without bias where outcomes were drawn.

    A loss is a constant per position plus a sum over X, what it needs of the whole given as constants (alpha, above): so it
    may be computed on a part of X at a time.
    """

    logp_NX: torch.Tensor
    logq_NX: torch.Tensor
    mass_NX: torch.Tensor
    answer_N: torch.Tensor  # log q of the answer's token
    top_N: torch.Tensor  # log q of the target's most likely token
    alpha_N: torch.Tensor  # Σ min(p, q) over all outcomes, without gradient
    above_N: torch.Tensor  # Σ q over the outcomes with p > q, without gradient

    def expect(self, value_NX: torch.Tensor) -> torch.Tensor:
        """Σ_X mass · value [N]. Logs are finite here even where a probability is 0, so 0 · log 0 is 0."""
        return (self.mass_NX * value_NX).sum(-1)


Loss = Callable[[Outcomes], torch.Tensor]


def forward_kl(o: Outcomes) -> torch.Tensor:
    """KL(p ‖ q) = E_p[log p − log q] in nats per position [N].

    With a bucket at most the KL over the whole vocabulary (data-processing inequality), and zero only where head and tail
    mass agree; with draws its gradient is unbiased.
    """
    return o.expect(o.logp_NX - o.logq_NX)


def reverse_kl(o: Outcomes) -> torch.Tensor:
    """KL(q ‖ p) = Σ q (log q − log p): mode-seeking (Gu et al. 2023, arXiv 2306.08543). Needs the whole distribution."""
    return (o.logq_NX.exp() * (o.logq_NX - o.logp_NX)).sum(-1)


def jsd(o: Outcomes, beta: float = 0.5) -> torch.Tensor:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q (Agarwal et al. 2024, arXiv 2306.13649, eq. 1).

    That is 0 at both ends; as there, β = 0 stands for its limit over β, KL(p ‖ q), and β = 1 for KL(q ‖ p).
    """
    if beta in (0.0, 1.0):
        return reverse_kl(o) if beta else forward_kl(o)
    weight = torch.tensor(beta, dtype=o.logq_NX.dtype, device=o.logq_NX.device)
    logm_NX = torch.logaddexp(o.logp_NX + weight.log(), o.logq_NX + (1 - weight).log())
    of_p = o.logp_NX.exp() * (o.logp_NX - logm_NX)
    return (beta * of_p + (1 - beta) * o.logq_NX.exp() * (o.logq_NX - logm_NX)).sum(-1)


def total_variation(o: Outcomes) -> torch.Tensor:
    """1 − Σ min(p, q) = TV(p, q): exactly one minus the acceptance (Leviathan et al. 2022, theorem 3.5).

    With a bucket Σ min is the upper end of α's bracket, so this is the lower end of TV.
    """
    return 1 - _overlap(o)


def tvd_plus_plus(o: Outcomes) -> torch.Tensor:
    """TVD++ (Goel et al. 2024, arXiv 2403.00858): ∇TV = −E_q[r ∇log q] with reward r = 1[p > q], and the reward normalised
    by its mean and standard deviation like an advantage.

    They take both over a batch of samples; here they are the position's own and exact, so a window that is split otherwise
    gives the same gradient. Its value is TV / σ with σ held constant, σ² = r̄ (1 − r̄), at least 0.05².
    """
    spread_N = (o.above_N * (1 - o.above_N)).clamp(min=0.05**2).sqrt()
    return total_variation(o) / spread_N


def lk_hybrid(o: Outcomes) -> torch.Tensor:
    """λ KL(p ‖ q) + (1 − λ)(1 − a), a = Σ min(p, q), λ = exp(−3 a) held constant (LK losses, arXiv 2602.23881)."""
    blend_N = (-3 * o.alpha_N).exp()
    return blend_N * forward_kl(o) + (1 - blend_N) * total_variation(o)


def neg_log_alpha(o: Outcomes) -> torch.Tensor:
    """−log max(a, 1e-5), a = Σ min(p, q) (LK losses, arXiv 2602.23881). Not unbiased where outcomes were drawn.

    Written as −a / a₀ + 1 − log a₀ with a₀ = a held constant: the same value and gradient, and a sum over outcomes.
    """
    alpha_N = o.alpha_N.clamp(min=1e-5)
    return 1 - _overlap(o) / alpha_N - alpha_N.log()


def cross_entropy(o: Outcomes) -> torch.Tensor:
    """−log q(answer token) in nats per position [N]."""
    return -o.answer_N


def top1_ce(o: Outcomes) -> torch.Tensor:
    """−log q(argmax p): with greedy serving a draft is accepted where it is the target's most likely token."""
    return -o.top_N


def _overlap(o: Outcomes) -> torch.Tensor:
    """Σ min(p, q) = E_p[min(1, q/p)] [N]."""
    return o.expect((o.logq_NX - o.logp_NX).clamp(max=0.0).exp())


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
    "tvd_plus_plus": tvd_plus_plus,
    "lk_hybrid": lk_hybrid,
    "neg_log_alpha": neg_log_alpha,
    "cross_entropy": cross_entropy,
    "top1_ce": top1_ce,
}
# They read alpha or above, which are known only once all outcomes were seen.
NEED_WHOLE = frozenset({"tvd_plus_plus", "lk_hybrid", "neg_log_alpha"})
# A sum over q: outside the head, where q may be large and p is small, neither a bucket nor draws from p can tell it.
NEED_ALL = frozenset({"reverse_kl", "jsd"})
