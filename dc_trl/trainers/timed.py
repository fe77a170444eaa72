"""Where the time of a training goes: the parts of `clock.PartsClock`, in the methods that TRL profiles too.

TRL's `profiling_context` and `profiling_decorator` send what they measure to Weights & Biases, MLflow and Trackio and
to nobody else: no callback and no log sees it, and what is nested counts twice. So the same methods are timed here.

The clock is the host's. What generates, rewards and writes weights ends on the host, so those are exact. A GPU works
behind the host: what it still has to do is charged to the part that waits for it. So the clock waits for the device
where the host is about to wait anyway: at the end of a micro-batch, after which transformers looks at the loss, and
before the statistics of a generation batch are reduced. What the measuring adds to the device's work between two
waits is part of what runs there; `scripts/benchmark.py overhead` has it.
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
    """Has the time within a method of a [`TimedTrainer`] go to a part."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def timed_method(self: TimedTrainer, *args: Any, **kwargs: Any) -> Any:
            with self.parts_clock.part(part):
                return method(self, *args, **kwargs)

        return timed_method

    return decorate


class TimedTrainer(ResumableTrainer):
    """A trainer that knows where the time of its training went.

    Attributes:
        parts_clock (`PartsClock`): runs during `train`; a resumed run goes on from its checkpoint's seconds.
        training_seconds (`float`): from the start of the first step to the end of the last, evaluations and
            checkpoints between them included. A resumed run adds those of its checkpoint; what a kill has lost is in
            neither.
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
        if self.parts_clock.present != OTHER:  # of the loss, or of a form that makes a forward of its own
            return score(model, *args, **kwargs)
        with self.parts_clock.part("logps"):
            return score(model, *args, **kwargs)

    @timed(EVALUATION)
    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, dataloader, *args, **kwargs):
        if isinstance(
            dataloader.dataset, IterableDataset
        ):  # of a stream nobody knows how far it is, and transformers shows no bar either
            return super().evaluation_loop(dataloader, *args, **kwargs)
        # Made before transformers would make one, after its first batch and without a label.
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
        """Charges a part with what the device has still to do."""
        if self.accelerator.device.type != "cpu":
            with self.parts_clock.part(part):
                torch.accelerator.synchronize()

    def _iteration_state(self) -> dict[str, Any]:
        seconds = self.parts_clock.seconds()
        return super()._iteration_state() | {"seconds": seconds, "training_seconds": self.training_seconds}

    def _load_iteration_state(self, state, within_batch):
        super()._load_iteration_state(state, within_batch)
        earlier = state.get("seconds", {})  # absent in checkpoints of before there was a clock
        self.parts_clock.carry(earlier)
        self.training_seconds += state.get("training_seconds", sum(earlier.values()))  # likewise


class _Steps(TrainerCallback):
    """Counts the seconds of training, and ends the optimizer's part, whose method is transformers' own loop."""

    def __init__(self, trainer: TimedTrainer):
        self._trainer = trainer
        self._counted: float | None = None  # until when the seconds are counted, by the clock; None before a step

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
