"""Advantages from the rewards of a prompt's completions, by estimators that TRL's group normalisation does not offer.

`rewards` has shape (N,). It holds the rewards of the `num_generations` completions of each prompt, one prompt after
the other, and NaN where no reward function could score a completion, which then counts nowhere.
"""

import torch
from torch import Tensor


def leave_one_out_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """Return each reward minus the mean reward of the prompt's other completions (RLOO, arXiv 2402.14740).

    Returns:
        Shape (N,); 0 where a completion has no reward, or no other completion of its prompt has one.
    """
    groups = rewards.view(-1, num_generations)
    others = groups.isfinite().sum(-1, keepdim=True) - 1
    mean_of_others = (groups.nansum(-1, keepdim=True) - groups) / others.clamp(min=1)
    return (groups - mean_of_others).where(others > 0, 0.0).nan_to_num(nan=0.0).flatten()


def zero_std_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Return which completions belong to a prompt whose completions all have the same reward.

    Returns:
        Boolean, shape (N,); true also where fewer than two of the completions have a reward.
    """
    groups = rewards.view(-1, num_generations)
    highest = groups.nan_to_num(nan=-torch.inf).amax(-1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(-1)
    return (highest <= lowest).repeat_interleave(num_generations)
