"""Rewards of a generation batch, before they become advantages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checked_reward import LARGEST


def finite_totals(rewards: Tensor, weights: Tensor, functions: Sequence[Any], names: Sequence[str]) -> Tensor:
    """Return the weighted sum of several reward functions, shape (N,); NaN where no function applies.

    Rewards of models, and sums, that are not finite are refused; functions' are finite.

    Args:
        rewards: of each completion, shape (N, functions); NaN where a function does not apply.
        weights: weight of each function, shape (functions,).
        functions, names: reward models and functions, and how TRL calls them.

    Raises:
        ValueError: one is not finite, or too large for a mean in float32.
    """
    of_models = torch.tensor([isinstance(function, nn.Module) for function in functions])
    totals = (rewards * weights.to(rewards.device)).nansum(-1).masked_fill(rewards.isnan().all(-1), torch.nan)
    wrong = ~rewards[:, of_models].isfinite().all(1) | (totals.abs() > LARGEST)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        given = dict(zip(names, rewards[row].tolist(), strict=True))
        raise ValueError(
            f"The rewards of completion {row}, {given} with reward_weights={weights.tolist()}, or their sum, are not "
            f"finite or exceed {LARGEST:g}: return finite rewards, or lower the weights."
        )
    return totals


def zero_std_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Return which completions belong to a prompt whose completions all have the same reward.

    Args:
        rewards: shape (N,), those of the completions of each prompt, one prompt after the other; NaN where no reward
            function could score a completion, which then counts nowhere.
        num_generations: number of completions of a prompt.

    Returns:
        Boolean, shape (N,); true also where fewer than two of the completions have a reward.
    """
    groups = rewards.view(-1, num_generations)
    highest = groups.nan_to_num(nan=-torch.inf).amax(-1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(-1)
    return (highest <= lowest).repeat_interleave(num_generations)
