"""Rewards of the deployed policy's greedy completions, by its own engine and at its present weights."""

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from ..trainer import DCGRPOTrainer
from .progress import in_parts


def greedy_rewards(trainer: DCGRPOTrainer, dataset: Dataset | IterableDataset, batch_size: int) -> list[float]:
    """Rewards of the deployed policy's greedy completions, the problems divided among the processes.

    Args:
        trainer: with a replica or vLLM (`deployment_scheme` or `use_vllm` set).
        dataset: with the column `prompt`, and others that the reward reads. Every process reads the whole of a stream.
        batch_size: prompts at a time in each process.

    Returns:
        The weighted sum of the rewards for each problem that got one; the same list in every process.
    """
    accelerator = trainer.accelerator
    problems = list(dataset) if isinstance(dataset, IterableDataset) else dataset
    size = len(problems)
    rewards: list[float | None] = []
    starts = range(0, size, accelerator.num_processes * batch_size)
    for start in in_parts(trainer, starts, "held-out problems, greedy"):
        first = start + accelerator.process_index * batch_size
        # Every process asks for as many completions; those of rows beyond the last one do not count.
        rows = [problems[min(row, size - 1)] for row in range(first, first + batch_size)]
        rewards += trainer.deployed_rewards(rows)[: len(range(first, min(first + batch_size, size)))]
    return [value for value in gather_object(rewards) if value is not None]
