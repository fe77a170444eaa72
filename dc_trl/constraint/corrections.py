"""Corrections of the rollouts: weights of the sampled tokens, computed from their probabilities under both engines.

A correction is a function of the sampled tokens that returns the weight of each of them. The trainer multiplies the
token's advantage by this weight, after the form of the constraint has acted. A weight of 0 masks the token: it has no
gradient and does not count in δ̄. With r = π_train/π_inf of a token, taken at the weights that sampled, each function
below says what its weight is, and where it comes from.

Each function takes the `SampledTokens`, whose advantages the weights will multiply, and the bounds ``lower`` and
``upper``, whose defaults are also those of the settings. It returns weights ≥ 0, shape (B, T), float32 (float64 if an
input is float64), detached. Ratios are clamped to e^±20, and a token that is not scored has r = 1. Where the engines
agree, all weights are 1.

A user's own function has the signature of `token_truncate` and is named `module:function`.

Several corrections combine: the first one gives the weights, and each other one sets those of the tokens to 0 to which
it gives 0 itself. ``["token_truncate", "geometric_mask(0.99, 1.01)"]`` is TIS on the trajectories that the mask keeps.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND, SampledTokens, trajectory_mean
from ..settings.fields import resolve
from .settings import ConstraintSettings, parts_of


# Upper bound of r where a mask looks at one direction only, as in the code of DPPO's authors: where a rare token has
# become less rare, r is large, and |π − q| is too small for a mask.
ONE_SIDED_BOUND = 20.0


# A correction with its bounds: it returns the weight of each token, shape (B, T).
Correction: TypeAlias = Callable[[SampledTokens], Tensor]


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _within(ratio: Tensor, lower: float, upper: float) -> Tensor:
    return (ratio >= lower) & (ratio <= upper)


def token_truncate(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Return clip(r, lower, upper): TIS, fengyao.notion.site/off-policy-rl; by default 2, of arXiv 2602.01826."""
    return _bounded_exp(tokens.log_ratio).clamp(lower, upper)


def token_mask(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Return r where it is within the bounds, else 0: MIS, richardli.xyz/rl-collapse, with the same default."""
    ratio = _bounded_exp(tokens.log_ratio)
    return ratio.where(_within(ratio, lower, upper), 0.0)


def _sequence_ratio(tokens: SampledTokens) -> Tensor:
    log_ratio = tokens.log_ratio
    return _bounded_exp(log_ratio.sum(-1, keepdim=True)).expand_as(log_ratio)


def sequence_truncate(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Truncate as `token_truncate` does, with the ratio of the whole trajectory at each of its tokens."""
    return _sequence_ratio(tokens).clamp(lower, upper)


def sequence_mask(tokens: SampledTokens, lower: float = 0.0, upper: float = 2.0) -> Tensor:
    """Mask whole trajectories: apply `token_mask` to the ratio of the trajectory."""
    ratio = _sequence_ratio(tokens)
    return ratio.where(_within(ratio, lower, upper), 0.0)


def geometric_mask(tokens: SampledTokens, lower: float = 0.99, upper: float = 1.01) -> Tensor:
    """Mask trajectories whose geometric mean of r is out of bounds (arXiv 2512.23075); the others have a weight of 1.

    The default bounds are SkyRL's. They suit long trajectories, in whose mean the noise of single tokens cancels.
    """
    log_ratio = tokens.log_ratio
    mean = _bounded_exp(trajectory_mean(log_ratio, tokens.scored).unsqueeze(-1))
    return _within(mean, lower, upper).to(log_ratio.dtype).expand_as(log_ratio)


def icepop(tokens: SampledTokens, lower: float = 0.5, upper: float = 5.0) -> Tensor:
    """Apply `token_mask` with bounds α = 0.5 and β = 5 on both sides (arXiv 2510.18855; arXiv 2512.16144, eq. 1)."""
    return token_mask(tokens, lower, upper)


def tv_mask(tokens: SampledTokens, upper: float = 0.2) -> Tensor:
    """Mask by the total variation of the sampled token against all others (DPPO, arXiv 2602.04879).

    A token with Â > 0 is masked where π_train − π_inf > upper, and one with Â < 0 where it is below −upper. A token
    that its advantage pushes back towards the sampler is never masked. The other tokens have the weight r, at most 20
    as in the authors' code. The default bound of 0.2 is SkyRL's.
    """
    train, infer = (logps.where(tokens.scored, 0.0) for logps in tokens.detached_logps)
    masked = (train.exp() - infer.exp()) * tokens.token_advantages.sign() > upper
    return _bounded_exp(tokens.log_ratio).clamp(max=ONE_SIDED_BOUND).masked_fill(masked, 0.0)


def ppo_clip(tokens: SampledTokens, lower: Tensor | float = 0.76, upper: Tensor | float = 1.24) -> Tensor:
    """Weight by r and mask the tokens that PPO clips, with the sampler as the old policy (arXiv 1707.06347, eq. 7).

    A token with Â > 0 is masked where r > upper, and one with Â < 0 where r < lower: these tokens have no gradient in
    min(r Â, clip(r) Â). The others have the weight r, at most 20. The default bounds are 1 ± the paper's `epsilon`.
    """
    ratio = _bounded_exp(tokens.log_ratio)
    direction = tokens.token_advantages.sign()
    masked = ((direction > 0) & (ratio > upper)) | ((direction < 0) & (ratio < lower))
    return ratio.clamp(max=ONE_SIDED_BOUND).masked_fill(masked, 0.0)


_ALL = (token_truncate, token_mask, sequence_truncate, sequence_mask, geometric_mask, icepop, tv_mask, ppo_clip)
CORRECTIONS: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in _ALL}
_TRUNCATIONS = ("token_truncate", "sequence_truncate")  # which give no token the weight 0


def correction_of(settings: ConstraintSettings) -> Correction | None:
    """Return the correction that the settings ask for; None for `rollout_correction="none"`.

    Raises:
        ValueError: `rollout_correction` does not name a correction (see `resolve`), or several that do not combine.
    """
    if settings.rollout_correction == "none":
        return None
    parts = parts_of(settings.rollout_correction)
    given = {"lower": settings.rollout_correction_min, "upper": settings.rollout_correction_max}
    of_fields = {name: bound for name, bound in given.items() if bound is not None}
    said = f"rollout_correction={settings.rollout_correction!r}"
    if len(parts) == 1:
        parts[0][1].update(of_fields)
    elif of_fields:
        raise ValueError(
            f"rollout_correction_min and rollout_correction_max do not say which of {said} they bound: leave them "
            "out, and write bounds after a name, as in 'token_truncate(0, 2)'."
        )
    for name, _ in parts[1:]:
        if name in _TRUNCATIONS:
            raise ValueError(f"{said}: {name} masks no token, so it has no effect behind another: put it first.")
    for name, bounds in parts:
        if bounds.get("lower", -math.inf) > bounds.get("upper", math.inf):
            raise ValueError(f"{said}: {name} masks every token, because its lower bound is above its upper one.")
    first, *masks = (
        partial(resolve("rollout_correction", name, CORRECTIONS, **bounds), **bounds) for name, bounds in parts
    )

    def correction(tokens: SampledTokens) -> Tensor:
        weights = first(tokens)
        for mask in masks:
            weights = weights.where(mask(tokens) > 0, 0.0)
        return weights

    return correction
