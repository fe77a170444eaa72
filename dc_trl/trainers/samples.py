"""Keeps some completions of a run beside its history; see `records.samples`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..records.samples import Sample, SampleRecord, choose_samples
from ..trl_hooks import HookedTrainer


def sampled(trainer: HookedTrainer, rewards: torch.Tensor) -> list[Sample]:
    """Return the first, best and worst of the completions that a trainer has just scored.

    Args:
        trainer: trainer with these completions at the end of its table of completions.
        rewards: rewards of the completions of all processes, NaN for those without one; shape (completions,).
    """
    count = len(rewards)
    prompts, completions = (list(trainer.completion_table[name])[-count:] for name in ("prompt", "completion"))
    return choose_samples(prompts, completions, rewards.tolist())


class HistoryKeeper(TrainerCallback):
    """Base of callbacks that keep a run's history; a trainer that has one also keeps completions."""


class SampleRecordCallback(TrainerCallback):
    """Writes a few completions into `completions.json` in the output directory if the run's history is kept.

    Each log of a training step adds completions of the present batch; of a long run only a few steps are kept.

    Args:
        trainer: trainer of the run, with its latest completions in `samples`.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._start = 0  # step with which the training began
        self._record: SampleRecord | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._start, self._record = state.global_step, None
        if state.is_world_process_zero and self._start > 0 and self._is_kept():
            self._record = SampleRecord(Path(args.output_dir), self._start)  # refuses a damaged file early

    def on_log(self, args, state, control, logs=None, **kwargs):
        # The logs at the end of training and of an evaluation have no loss.
        if not state.is_world_process_zero or "loss" not in (logs or {}) or not self._trainer.samples:
            return
        if not self._is_kept():
            return
        if self._record is None:
            self._record = SampleRecord(Path(args.output_dir), self._start)
        self._record.add(state.global_step, self._trainer.samples)

    def _is_kept(self) -> bool:
        return any(isinstance(callback, HistoryKeeper) for callback in self._trainer.callback_handler.callbacks)
