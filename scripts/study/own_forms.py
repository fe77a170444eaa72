"""Forms and corrections of the study that the package does not have."""

import torch
from torch import Tensor

from dc_trl.constraint.corrections import ppo_clip, token_truncate
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


def odds_clip(tokens: SampledTokens) -> Tensor:
    """Return the weights of `ppo_clip`, which masks by the ratio of the odds p/(1 − p) where PPO takes that of p.

    Near p = 1 the ratio hardly moves while the probability of all other tokens doubles; the odds move as much as that.
    """
    train, infer = (logps.where(tokens.scored, 0.0) for logps in tokens.detached_logps)
    # 1e-6 keeps a certain token's odds finite; it is above the rounding of float32.
    odds = (train.exp() / (1 - train.exp() + 1e-6)) / (infer.exp() / (1 - infer.exp() + 1e-6))
    masked = ppo_clip(tokens._replace(train_logps=odds.log(), infer_logps=torch.zeros_like(odds))) == 0
    return ppo_clip(tokens, 0.0, float("inf")).masked_fill(masked, 0.0)


def ppo_clip_by_age(tokens: SampledTokens) -> Tensor:
    """Return the weights of `ppo_clip` with a bound of e^±0.03 for each optimizer step that the sampler is behind.

    In the step after a synchronization the bound is e^0.03, after seven more steps e^0.24.
    """
    bound = (0.03 * (torch.as_tensor(tokens.age, device=tokens.scored.device, dtype=torch.float32) + 1)).exp()
    bound = bound.unsqueeze(-1) if bound.dim() else bound
    return ppo_clip(tokens, 1 / bound, bound)


def decoupled(tokens: SampledTokens) -> Tensor:
    """Return the weights of TIS on the engine's part times those of PPO's clip on the lag's (AReaL, arXiv 2505.24298).

    The discrepancy has to be split. AReaL's middle policy is one step old; here it is the one that sampled.
    """
    return token_truncate(tokens.of_part("engine")) * ppo_clip(tokens.of_part("lag"))
