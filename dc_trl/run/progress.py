"""What a training shows while it runs: one progress bar, or the logs of transformers in brief.

History and trackers get all of a log: transformers gives each callback the same one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_utils import has_length


class ConstraintProgressCallback(ProgressCallback):
    """Transformers' progress bar, with reward, δ̄ and λ on it in place of a printed line for every log.

    While the trainer evaluates, the bar says so; there is no second bar.
    """

    _batches = 0  # of the evaluation that is going on

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        shown = {"reward": "reward", "δ̄": "discrepancy/mean", "λ": "lagrangian/lambda"}
        values = {label: f"{logs[name]:.3g}" for label, name in shown.items() if logs.get(name) is not None}
        if values:
            self.training_bar.set_postfix(values)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self.training_bar is None:
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)
        elif has_length(eval_dataloader):
            self._batches += 1
            self.training_bar.set_description(f"held-out problems, {self._batches} of {len(eval_dataloader)}")

    def on_evaluate(self, args, state, control, **kwargs):
        super().on_evaluate(args, state, control, **kwargs)
        self._batches = 0
        if self.training_bar is not None:
            _go_on(self.training_bar)


def in_parts(trainer: Trainer, parts: Sequence[Any], label: str) -> Iterator[Any]:
    """Yield parts of some work one by one; the bar of the training counts them, or without one a bar of their own."""
    bars = (each.training_bar for each in trainer.callback_handler.callbacks if isinstance(each, ProgressCallback))
    bar = next((bar for bar in bars if bar is not None), None)
    if bar is None:
        hidden = trainer.args.disable_tqdm or not trainer.is_world_process_zero()
        yield from tqdm(parts, desc=label, unit="batch", leave=False, dynamic_ncols=True, disable=hidden)
        return
    for number, part in enumerate(parts, start=1):
        bar.set_description(f"{label}, {number} of {len(parts)}")
        yield part
    _go_on(bar)


def _go_on(bar: tqdm) -> None:
    """Let the bar show steps again; its expected time excludes what came in between."""
    bar.set_description()
    bar.unpause()


# Our metrics, in an evaluation too, without the five that are printed.
_LEFT_OUT = re.compile(
    r"(eval_(\w+_)?)?(discrepancy(_truncated)?|lagrangian|correction|sync|overlap|routing|time)/"
    r"(?!(mean|k3_kl|lag_k3_kl|lambda|age)$)"
)


class _Brief(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: value for name, value in (logs or {}).items() if not _LEFT_OUT.match(name)}
        super().on_log(args, state, control, logs=shown, **kwargs)


class BriefPrinter(_Brief, PrinterCallback):
    """Transformers' printed line for each log, with fewer metrics."""


class BriefProgress(_Brief, ProgressCallback):
    """Transformers' progress bar, with fewer metrics in the lines above it."""


# Transformers' callbacks, which it adds to a trainer by their classes, and what is added in their place.
BRIEF: Mapping[Any, Any] = {PrinterCallback: BriefPrinter, ProgressCallback: BriefProgress}
