"""Corrections of the rollouts: how much each sampled token counts, by its two engines' probabilities.

A correction is a function of the sampled tokens that returns the weight of each of them. The trainer multiplies the
token's advantage by it, after the form of the constraint has acted. A weight of 0 masks the token: it teaches nothing,
and is not in δ̄. With r = π_train/π_inf of a token, all taken at the weights that sampled:

===================== ======================================================= ========================================
``token_truncate``    clip(r, lower, upper)                                   TIS, fengyao.notion.site/off-policy-rl
``token_mask``        r within [lower, upper], else 0                         MIS, richardli.xyz/rl-collapse
``sequence_truncate`` clip(Π_t r_t, lower, upper)                             sequence TIS, the same
``sequence_mask``     Π_t r_t within [lower, upper], else 0                   sequence MIS, the same
``geometric_mask``    1 where (Π_t r_t)^(1/|o|) is within the bounds, else 0  the same; arXiv 2512.23075
``icepop``            r within [lower, upper], else 0; two-sided by default   IcePop, arXiv 2510.18855
``tv_mask``           r, 0 where the token has moved past upper the way that  DPPO-Binary-TV, arXiv 2602.04879
                      its advantage pushes it
``ppo_clip``          r, 0 where it has passed a bound the way that its       PPO, arXiv 1707.06347, eq. 7, with the
                      advantage pushes it                                     sampler as the old policy
===================== ======================================================= ========================================

Each function takes the `SampledTokens`, whose advantages are those that the weights will multiply, and the bounds
``lower`` and ``upper``, whose defaults are those of the settings. It returns weights ≥ 0, shape (B, T), float32
(float64 if an input is float64), detached. Ratios are bounded by e^±20, and the r of a token that is not scored is 1.
Engines that agree have weights of 1.

A function of one's own has the signature of `token_truncate` and is named `module:function`.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND, SampledTokens, trajectory_mean
from .custom import resolve
from .settings import ConstraintSettings


# What bounds r where a mask looks at one direction only. DPPO's authors have it in their code: where a rare token has
# become less rare, r is large and |π − q| so small that nothing masks it.
ONE_SIDED_BOUND = 20.0


class Correction(Protocol):
    """A correction with its bounds."""

    def __call__(self, tokens: SampledTokens) -> Tensor:
        """Return the weight of each token, shape (B, T), as the top of this file says."""


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _within(ratio: Tensor, lower: float, upper: float) -> Tensor:
    return (ratio >= lower) & (ratio <= upper)


def token_truncate(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Truncate importance weights: clip(r, lower, upper). C = 2 as in arXiv 2602.01826."""
    return _bounded_exp(tokens.log_ratio).clamp(lower, upper)


def token_mask(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Mask importance weights: r where it is within the bounds, else 0. C = 2 as in arXiv 2602.01826."""
    ratio = _bounded_exp(tokens.log_ratio)
    return ratio.where(_within(ratio, lower, upper), 0.0)


def _sequence_ratio(tokens: SampledTokens) -> Tensor:
    """Return Π_t r_t of each trajectory at all of its positions, shape (B, T)."""
    log_ratio = tokens.log_ratio
    return _bounded_exp(log_ratio.sum(-1, keepdim=True)).expand_as(log_ratio)


def sequence_truncate(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Do as `token_truncate` with the ratio of the whole trajectory, which all of its tokens carry."""
    return _sequence_ratio(tokens).clamp(lower, upper)


def sequence_mask(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Do as `token_mask` with the ratio of the whole trajectory: it is masked whole."""
    ratio = _sequence_ratio(tokens)
    return ratio.where(_within(ratio, lower, upper), 0.0)


def geometric_mask(tokens: SampledTokens, lower: float = 0.99, upper: float = 1.01) -> Tensor:
    """Mask a trajectory whose geometric mean of r is out of bounds: `sequence_mask` without its bias by length.

    It is a mask alone: what stays has a weight of 1. The bounds are SkyRL's. They suit long trajectories, in whose
    mean the noise of single tokens cancels.
    """
    log_ratio = tokens.log_ratio
    mean = _bounded_exp(trajectory_mean(log_ratio, tokens.scored).unsqueeze(-1))
    return _within(mean, lower, upper).to(log_ratio.dtype).expand_as(log_ratio)


def icepop(tokens: SampledTokens, lower: float = 0.5, upper: float = 5.0) -> Tensor:
    """Bound `token_mask` on both sides (IcePop, arXiv 2510.18855; arXiv 2512.16144, eq. 1), by α = 0.5 and β = 5."""
    return token_mask(tokens, lower, upper)


def tv_mask(tokens: SampledTokens, upper: float = 0.2) -> Tensor:
    """Mask by the total variation of the sampled token against all others (DPPO, arXiv 2602.04879).

    A token with Â > 0 is masked where π_train − π_inf > upper, one with Â < 0 where it is below −upper. A token that
    its advantage pushes back to the sampler is never masked. What stays carries r, at most 20 as in the authors' code.
    The bound of 0.2 is SkyRL's.
    """
    train, infer = (logps.where(tokens.scored, 0.0) for logps in tokens.detached_logps)
    masked = (train.exp() - infer.exp()) * tokens.token_advantages.sign() > upper
    return _bounded_exp(tokens.log_ratio).clamp(max=ONE_SIDED_BOUND).masked_fill(masked, 0.0)


def ppo_clip(tokens: SampledTokens, lower: float = 0.76, upper: float = 1.24) -> Tensor:
    """Clip as PPO does with the sampler as the old policy (arXiv 1707.06347, eq. 7): weight by r, mask what it clips.

    A token with Â > 0 is masked where r > upper, one with Â < 0 where r < lower: those have no gradient in
    min(r Â, clip(r) Â). What stays carries r, at most 20. The bounds are 1 ± `epsilon` of the paper's recipe.
    """
    ratio = _bounded_exp(tokens.log_ratio)
    direction = tokens.token_advantages.sign()
    masked = ((direction > 0) & (ratio > upper)) | ((direction < 0) & (ratio < lower))
    return ratio.clamp(max=ONE_SIDED_BOUND).masked_fill(masked, 0.0)


_ALL = (token_truncate, token_mask, sequence_truncate, sequence_mask, geometric_mask, icepop, tv_mask, ppo_clip)
CORRECTIONS: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in _ALL}


def correction_of(settings: ConstraintSettings) -> Correction | None:
    """Return the correction that the settings ask for; None for `rollout_correction="none"`.

    Raises:
        ValueError: `rollout_correction` names none; see `resolve`.
    """
    if settings.rollout_correction == "none":
        return None
    bounds = {"lower": settings.rollout_correction_min, "upper": settings.rollout_correction_max}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return partial(resolve("rollout_correction", settings.rollout_correction, CORRECTIONS, **given), **given)
