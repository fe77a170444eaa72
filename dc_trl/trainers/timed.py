"""Measures the parts of the training time with `clock.PartsClock`, in the methods that TRL profiles too.

TRL's `profiling_context` and `profiling_decorator` send their measurements only to Weights & Biases, MLflow and
Trackio; callbacks and logs do not see them, and nested times count twice. Therefore the same methods are timed here.

The clock runs on the host. Generation, rewards and the writing of weights end on the host, so their times are exact. A
GPU works asynchronously, and its remaining work is charged to the part that waits for it. Therefore the clock waits
for the device where the host is about to wait anyway: at the end of a micro-batch, after which transformers reads the
loss, and before the statistics of a generation batch are reduced. The cost of measuring is part of the time between
two waits; `scripts/benchmark.py overhead` measures it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from ..config import DCGRPOConfig
from ..records.time_parts import EVALUATION, OTHER, PREFIX
from .clock import PartsClock
from .progress import evaluation_bar, progress_callbacks
from .resumable import ResumableTrainer


def timed(part: str) -> Callable[[Callable], Callable]:
    """Return a decorator that counts the time within a method of a [`TimedTrainer`] for a part."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def timed_method(self: TimedTrainer, *args: Any, **kwargs: Any) -> Any:
            with self.parts_clock.part(part):
                return method(self, *args, **kwargs)

        return timed_method

    return decorate


class TimedTrainer(ResumableTrainer):
    """A trainer that measures the parts of its training time.

    Attributes:
        parts_clock (`PartsClock`): runs during `train`; a resumed run continues with the seconds of its checkpoint.
        training_seconds (`float`): seconds from the start of the first step to the end of the last one, including
            evaluations and checkpoints between them. A resumed run adds the seconds of its checkpoint; neither
            attribute includes work that was lost when a run was killed.
    """

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        self.parts_clock = PartsClock()
        self.training_seconds = 0.0
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.add_callback(_Steps(self))

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        self.parts_clock.start()
        self.training_seconds = 0.0
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.parts_clock.stop()

    def training_step(self, model, inputs, num_items_in_batch):
        with self.parts_clock.part("loss"):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self._wait_for_device("loss")
        if self.accelerator.sync_gradients:  # gradients are clipped, then the optimizer steps
            self.parts_clock.switch("optimizer")
        return loss

    @timed(OTHER)
    def _prepare_inputs(self, generation_batch):
        return super()._prepare_inputs(generation_batch)

    @timed("generation")
    def _generate(self, prompts):
        return super()._generate(prompts)

    @timed("waiting")
    def _take_up(self, prompts, sampler_step):
        super()._take_up(prompts, sampler_step)

    @timed("sync")
    def _bring_weights(self, training):
        super()._bring_weights(training)

    @timed("reward")
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        score = super()._get_per_token_logps_and_entropies
        if self.parts_clock.present != OTHER:  # within the loss, or within a form with a forward of its own
            return score(model, *args, **kwargs)
        with self.parts_clock.part("logps"):
            return score(model, *args, **kwargs)

    @timed(EVALUATION)
    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, dataloader, *args, **kwargs):
        # The length of a stream is unknown, and transformers shows no bar for it either.
        if isinstance(dataloader.dataset, IterableDataset):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        # This bar precedes the one that transformers would make after its first batch, without a label.
        with evaluation_bar(self, "held-out problems", len(dataloader)) as bar:
            for callback in progress_callbacks(self):
                callback.prediction_bar = bar
            return super().evaluation_loop(dataloader, *args, **kwargs)

    @timed("saving")
    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)

    @timed("saving")
    def _export(self, folder):
        super()._export(folder)

    def log(self, logs, start_time=None):
        if self.model.training:
            logs |= {f"{PREFIX}{part}": seconds for part, seconds in self.parts_clock.lap().items()}
        with self.parts_clock.part("metrics"):
            super().log(logs, start_time)

    def _wait_for_device(self, part: str) -> None:
        """Charge a part with the remaining work of the device."""
        if self.accelerator.device.type != "cpu":
            with self.parts_clock.part(part):
                torch.accelerator.synchronize()

    def _iteration_state(self) -> dict[str, Any]:
        seconds = self.parts_clock.seconds()
        return super()._iteration_state() | {"seconds": seconds, "training_seconds": self.training_seconds}

    def _load_iteration_state(self, state, within_batch):
        super()._load_iteration_state(state, within_batch)
        earlier = state.get("seconds", {})  # absent in older checkpoints
        self.parts_clock.carry(earlier)
        self.training_seconds += state.get("training_seconds", sum(earlier.values()))  # also absent


class _Steps(TrainerCallback):
    """Counts the seconds of training, and ends the part of the optimizer, which steps in transformers' own loop."""

    def __init__(self, trainer: TimedTrainer):
        self._trainer = trainer
        self._counted: float | None = None  # clock time up to which seconds are counted; None before a step

    def on_train_begin(self, args, state, control, **kwargs):
        self._counted = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self._counted is None:
            self._counted = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._trainer.parts_clock.switch(OTHER)

    def on_step_end(self, args, state, control, **kwargs):
        assert self._counted is not None
        now = time.perf_counter()
        self._trainer.training_seconds += now - self._counted
        self._counted = now
