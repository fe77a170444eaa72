"""Measures of the discrepancy of a token between two engines, the paper's penalty, and the sums of a batch's mean.

These are pure tensor functions; `dc_trl.sampled_tokens` defines their arguments.
"""

import torch
from torch import Tensor

from ..sampled_tokens import bounded_log_ratio, detached, trajectory_mean
from ..settings.fields import require_choice
from .settings import Level, Measure, Reduction


def token_discrepancy(train_logps: Tensor, infer_logps: Tensor, measure: Measure = "prob_diff") -> Tensor:
    """Return the discrepancy δ of each token between the training and the sampling engine (arXiv 2606.08779, eq. 2).

    Args:
        train_logps: log π_train of the sampled tokens, any shape, floating point.
        infer_logps: log π_inf of the same tokens, same shape.
        measure: ``"prob_diff"`` |π_train − π_inf| in [0, 1]; ``"prob_ratio"`` |π_train/π_inf − 1| in
            [0, e^20 − 1], the ratio clamped to e^±20; ``"log_prob"`` |log π_train − log π_inf| ≥ 0, in nats.

    Returns:
        δ of each element, same shape, float32 (float64 if an input is float64), detached: no gradient ever flows
        through it. It is NaN where an input is NaN.

    Raises:
        ValueError: the measure is unknown, or the shapes differ.
    """
    return signed_discrepancy(train_logps, infer_logps, measure).abs()


def signed_discrepancy(train_logps: Tensor, infer_logps: Tensor, measure: Measure = "prob_diff") -> Tensor:
    """Return the signed discrepancy D of each token; it is positive where π_train is the larger one.

    The measures are π_train − π_inf, π_train/π_inf − 1 and log π_train − log π_inf, with δ = |D|. Arguments and errors
    are those of `token_discrepancy`.
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
        # Bounded, so that a token that the engine can hardly have sampled does not overflow the gradient of a batch.
        return torch.expm1(bounded_log_ratio(train, infer))
    return train - infer


def discrepancy_penalty(
    delta: Tensor, scored: Tensor, level: Level = "token", margin: float = 0.0, coefficient: Tensor | None = None
) -> Tensor:
    """Return what λ multiplies in the penalised advantage Ã = Â − λ·penalty (arXiv 2606.08779, eqs. 3, 4 and 8).

    Args:
        delta: δ of each token, shape (B, T).
        scored: which tokens count, boolean, shape (B, T).
        level: ``"token"``: the penalty of a token is its own; ``"sequence"``: it is the mean of its trajectory.
        margin: tokens with δ ≤ margin are not penalised; the penalty of the others is not reduced. At least 0.
        coefficient: penalty of each token, shape (B, T), of any sign; by default δ, the paper's form.

    Returns:
        Shape (B, T), dtype of ``delta``, 0 at unscored tokens.
    """
    penalty = delta if coefficient is None else coefficient
    if level == "sequence":
        delta, penalty = (trajectory_mean(value, scored).unsqueeze(-1).expand_as(value) for value in (delta, penalty))
    return penalty.where(scored & (delta > margin), 0.0)


def accumulator(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums are taken; Apple's MPS has no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def discrepancy_sums(delta: Tensor, scored: Tensor, reduction: Reduction = "sequence") -> dict[str, Tensor]:
    """Return numerator and denominator of the batch discrepancy δ̄ (arXiv 2606.08779, eq. 11).

    Args:
        delta: δ of each token, shape (B, T).
        scored: which tokens count, boolean, shape (B, T).
        reduction: ``"sequence"``: mean over trajectories of their token means; ``"token"``: mean over all tokens.

    Returns:
        "discrepancy_sum" and "discrepancy_count", scalars. A trajectory without a scored token counts nowhere.
    """
    delta = delta.to(accumulator(delta))
    if reduction == "sequence":
        total, count = trajectory_mean(delta, scored).sum(), scored.any(-1).sum()
    else:
        total, count = delta.where(scored, 0.0).sum(), scored.sum()
    return {"discrepancy_sum": total, "discrepancy_count": count.to(total.dtype)}
