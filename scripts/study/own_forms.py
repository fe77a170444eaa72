"""Forms of the study that the package does not have."""

import torch
from torch import Tensor

from dc_trl.constraint.discrepancy import signed_discrepancy
from dc_trl.constraint.forms import log_ratio
from dc_trl.sampled_tokens import SampledTokens


_RESOLUTION = 1e-5  # nats; log-probabilities that are closer have no sign, because two float32 forwards differ by it


def complete(tokens: SampledTokens, measure: str) -> Tensor:
    """Return δ + ∂δ/∂log π, with δ = |π − q|: the score function's coefficient in the whole gradient of E_π[δ].

    Raises:
        ValueError: the measure is another one.
    """
    if measure != "prob_diff":
        raise ValueError(f"discrepancy_measure={measure!r}: this form is written for 'prob_diff' alone.")
    gap = signed_discrepancy(tokens.train_logps, tokens.infer_logps, measure)
    train, infer = tokens.detached_logps
    sign = gap.sign().where((train - infer).abs() > _RESOLUTION, 0.0)
    return gap.abs() + sign * train.exp()


def shuffled_log_ratio(tokens: SampledTokens, measure: str) -> Tensor:
    """Return the log ratios of the scored tokens in a random order: a control for what the pull aims at."""
    ratios = log_ratio(tokens, measure)
    values = ratios[tokens.scored]
    return ratios.masked_scatter(tokens.scored, values[torch.randperm(len(values), device=values.device)])
