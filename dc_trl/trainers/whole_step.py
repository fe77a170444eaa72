"""The state between two optimizer steps, kept so that it can be saved after the next step has begun and failed."""

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TrainerCallback

from .sampling import SamplingTrainer


# Counters in transformers' state, which it updates during a step.
_COUNTERS = ("epoch", "num_input_tokens_seen", "total_flos")


class WholeStep(NamedTuple):
    """What one more step changes before it has ended, except weights and optimizer, which only the optimizer changes.

    Attributes:
        step: number of optimizer steps that have ended.
        iteration: state of the algorithm, which a checkpoint holds.
        micro_batches, rollouts, random, sampling, counted, flops: see `WholeStep.of`.
    """

    step: int
    iteration: dict[str, Any]
    micro_batches: int
    rollouts: Any
    random: dict[str, Any]
    sampling: dict[str, Any]
    counted: dict[str, Any]
    flops: float

    @classmethod
    def of(cls, trainer: SamplingTrainer) -> "WholeStep":
        """Return the state of a trainer whose step has just ended."""
        in_use = trainer.micro_batches_done % trainer.micro_batches_per_generation > 0
        return cls(
            step=trainer.state.global_step,
            iteration=copy.deepcopy(trainer.iteration_state()),
            micro_batches=trainer.micro_batches_done,
            rollouts=trainer.generation_batch if in_use else None,
            random=random_state(),
            sampling=trainer.sampler.state(),
            counted={name: getattr(trainer.state, name) for name in _COUNTERS},
            flops=trainer.current_flos,
        )

    def restore(self, trainer: SamplingTrainer) -> None:
        """Return a trainer to this state, from an unfinished step whose gradients are lost."""
        trainer.micro_batches_done, trainer.generation_batch = self.micro_batches, self.rollouts
        trainer.current_flos = self.flops
        for name, value in self.counted.items():
            setattr(trainer.state, name, value)
        set_random_state(self.random)
        trainer.sampler.return_to(self.sampling)


class WeightsMove(TrainerCallback):
    """Notes the step from which the optimizer is changing the weights.

    Attributes:
        since: number of optimizer steps at that time; None between two steps.
    """

    def __init__(self) -> None:
        self.since: int | None = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.since = state.global_step


def random_state() -> dict[str, Any]:
    """Return the states of all random number generators that a checkpoint contains."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from the states that `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
