"""How far apart two engines are on the same tokens: measures of a token's discrepancy, and the paper's penalty.

Pure tensor functions. Throughout this room, ``B`` is the number of trajectories, ``T`` the padded completion length,
``train_logps`` is log π_train(y_t) and ``infer_logps`` log π_inf(y_t) of the sampled tokens, both after temperature,
in nats. A token is *scored* when it enters the loss and both log-probabilities are finite; every function ignores
what stands at unscored positions, padding garbage and NaN included.
"""

import torch
from torch import Tensor

from ..settings.ranges import require_choice
from .settings import Level, Measure


# exp(2 · 20) is still far from overflow; the same bound as verl's, so that its χ² values can be compared with ours.
LOG_RATIO_BOUND = 20.0


def token_discrepancy(train_logps: Tensor, infer_logps: Tensor, measure: Measure = "prob_diff") -> Tensor:
    """Discrepancy δ of each token between the training and the sampling engine (arXiv 2606.08779, eq. 2).

    Args:
        train_logps: log π_train of the sampled tokens, any shape, floating point.
        infer_logps: log π_inf of the same tokens, same shape.
        measure: ``"prob_diff"`` |π_train − π_inf| in [0, 1]; ``"prob_ratio"`` |π_train/π_inf − 1| in
            [0, e^20 − 1], the ratio clamped to e^±20; ``"log_prob"`` |log π_train − log π_inf| ≥ 0, in nats.

    Returns:
        δ, elementwise, same shape, float32 (float64 if an input is float64), detached: no gradient ever flows through
        it. NaN in, NaN out.

    Raises:
        ValueError: unknown measure, or the shapes differ.
    """
    return signed_discrepancy(train_logps, infer_logps, measure).abs()


def signed_discrepancy(train_logps: Tensor, infer_logps: Tensor, measure: Measure = "prob_diff") -> Tensor:
    """D of each token, whose absolute value is δ: above 0 where the training engine gives the token more probability.

    Args and errors are those of `token_discrepancy`: π_train − π_inf, π_train/π_inf − 1, log π_train − log π_inf.
    """
    require_choice("discrepancy_measure", measure, Measure)
    if train_logps.shape != infer_logps.shape:
        raise ValueError(
            f"train_logps has shape {tuple(train_logps.shape)} and infer_logps {tuple(infer_logps.shape)}: pass the "
            "log-probabilities of the same tokens under both engines."
        )
    train, infer = detached(train_logps, infer_logps)
    if measure == "prob_diff":
        return train.exp() - infer.exp()
    if measure == "prob_ratio":
        # Bounded, so that one token that the engine cannot have sampled does not overflow the gradient of a batch.
        return torch.expm1(bounded_log_ratio(train, infer))
    return train - infer


def detached(train_logps: Tensor, infer_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Both without gradients in float32, or float64 if one of them is.

    16-bit log-probabilities are spaced more widely than the discrepancies that are looked for.
    """
    dtype = torch.promote_types(torch.promote_types(train_logps.dtype, infer_logps.dtype), torch.float32)
    return train_logps.detach().to(dtype), infer_logps.detach().to(dtype)


def bounded_log_ratio(train_logps: Tensor, infer_logps: Tensor) -> Tensor:
    """log π_train/π_inf, clamped to ±20."""
    return (train_logps - infer_logps).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def scored_tokens(mask: Tensor, *values: Tensor) -> Tensor:
    """Tokens that can be scored: inside ``mask`` and finite in every one of ``values``. Boolean, shape of ``mask``."""
    scored = mask.bool()
    for value in values:
        scored = scored & value.isfinite()
    return scored


def trajectory_mean(values: Tensor, scored: Tensor) -> Tensor:
    """Mean of ``values`` (B, T) over the scored tokens of each trajectory, shape (B,); 0 where none is scored."""
    return values.where(scored, 0.0).sum(-1) / scored.sum(-1).clamp(min=1)


def discrepancy_penalty(
    delta: Tensor, scored: Tensor, level: Level = "token", margin: float = 0.0, coefficient: Tensor | None = None
) -> Tensor:
    """What λ multiplies in the penalised advantage Ã = Â − λ·penalty (arXiv 2606.08779, eqs. 3, 4 and 8).

    Args:
        delta: δ of each token, shape (B, T).
        scored: boolean, shape (B, T).
        level: ``"token"``: each token carries its own; ``"sequence"``: each carries its trajectory's mean.
        margin: tokens with δ ≤ margin are not penalised; those above carry all of it. At least 0.
        coefficient: what a token carries, shape (B, T), of any sign; by default δ, the paper's form.

    Returns:
        Shape (B, T), dtype of ``delta``, 0 at unscored tokens.
    """
    require_choice("discrepancy_level", level, Level)
    carried = delta if coefficient is None else coefficient
    if level == "sequence":
        delta, carried = (trajectory_mean(value, scored).unsqueeze(-1).expand_as(value) for value in (delta, carried))
    return carried.where(scored & (delta > margin), 0.0)
