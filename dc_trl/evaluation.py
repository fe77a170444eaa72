"""How good the policy is as it is deployed."""

import math
from typing import NamedTuple

from accelerate.utils import gather_object
from datasets import Dataset

from .rewards import RewardFunction
from .trainer import DCGRPOTrainer


class Estimate(NamedTuple):
    """A mean over problems, its standard error, and the number of problems."""

    value: float
    standard_error: float
    problems: int


def greedy_accuracy(trainer: DCGRPOTrainer, dataset: Dataset, reward: RewardFunction, batch_size: int) -> Estimate:
    """Mean reward of the deployed policy's greedy completions, the problems divided among the processes.

    Args:
        trainer: with a replica or vLLM (`deployment_scheme` or `use_vllm` set).
        dataset: with the columns `prompt` and `answer`.
        reward: called with `completions` and `answer`; problems for which it returns None are left out.
        batch_size: prompts at a time in each process.

    Returns:
        The same estimate in every process.

    Raises:
        ValueError: the reward scored no problem.
    """
    accelerator = trainer.accelerator
    rewards: list[float | None] = []
    for start in range(0, len(dataset), accelerator.num_processes * batch_size):
        # All processes ask together, for as many each: the last ones fill up with problems that then do not count.
        first = start + accelerator.process_index * batch_size
        rows = range(first, first + batch_size)
        counted = len(range(first, min(first + batch_size, len(dataset))))
        batch = dataset.select([min(row, len(dataset) - 1) for row in rows])[:]
        scores = reward(completions=trainer.deployed_completions(batch["prompt"]), answer=batch["answer"])
        rewards += scores[:counted]
    scored = [value for value in gather_object(rewards) if value is not None]
    if not scored:
        raise ValueError("The reward scored none of the problems: check the gold answers.")
    mean = sum(scored) / len(scored)
    variance = sum((value - mean) ** 2 for value in scored) / max(len(scored) - 1, 1)
    return Estimate(mean, math.sqrt(variance / len(scored)), len(scored))
