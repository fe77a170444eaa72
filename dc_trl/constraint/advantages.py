"""Which prompts teach nothing: all of their completions have the same reward."""

import torch
from torch import Tensor


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
