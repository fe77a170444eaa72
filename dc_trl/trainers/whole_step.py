"""Where a run stood when its last optimizer step had ended, for the save that comes in the middle of the next one."""

import random
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback


class WholeStep(TrainerCallback):
    """Takes note at the end of each optimizer step of what the next one moves before it moves the weights.

    These are the random numbers, which a rollout draws its seeds from; the micro-batches, and λ, which moves with the
    last one of a generation batch, in the middle of a step where a step takes several of them.

    Args:
        trainer: a `ResumableTrainer`.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._taken: tuple[dict[str, Any], int, Any, dict[str, Any]] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._taken = None

    def on_step_end(self, args, state, control, **kwargs):
        self.take()

    def take(self) -> None:
        """The step has ended here."""
        trainer = self._trainer
        iteration = deepcopy(trainer._iteration_state())
        self._taken = (_random_state(), trainer._step, trainer._buffered_inputs, iteration)

    def go_back(self) -> None:
        """Puts the trainer back to where the last step has ended; nothing, where none has since training began."""
        if self._taken is not None:
            _, self._trainer._step, self._trainer._buffered_inputs, iteration = self._taken
            self.go_back_to_random_numbers()
            self._trainer._load_iteration_state(iteration, within_batch=True)

    def go_back_to_random_numbers(self) -> None:
        """Has the random numbers go on from where they were last taken note of."""
        if self._taken is not None:
            _set_random_state(self._taken[0])


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
