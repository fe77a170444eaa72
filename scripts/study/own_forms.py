"""The form of the study that the package does not have."""

from torch import Tensor

from dc_trl.constraint.discrepancy import signed_discrepancy
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
