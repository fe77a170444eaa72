"""`TrainingRun`: one training of a trainer, from the lock on its output directory to the error that ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

from accelerate.logging import get_logger

from ..files import lock_output
from ..processes import on_main_process
from ..serving.errors import ServerError
from .history import HistoryCallback
from .interruption import RunInterrupted, StopSignals
from .manifest import resumable_checkpoint, set_aside_later, step_of
from .resuming import require_loadable
from .soundness import DivergedError


logger = get_logger(__name__)


class TrainingRun:
    """Locks the output directory while a trainer trains, finds where it resumes, and saves it if it fails.

    Args:
        trainer: trainer with `checkpoints`.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._resumed_at: int | None = None  # step of the checkpoint from which the present training resumed

    @contextmanager
    def training(self, wanted: str | PathLike[str] | bool | None) -> Iterator[str | None]:
        """Train within the context, which yields the checkpoint to resume from; see `DCGRPOTrainer.train`.

        If an error of a reward function, callback or server or Ctrl-C ends it early, the last step that ended is
        saved. Nothing is saved while the optimizer is changing the weights; of several processes, a signal or a lost
        server saves, and another error does not.
        """
        trainer = self._trainer
        with ExitStack() as stack:

            def open_output() -> str | None:
                stack.enter_context(lock_output(trainer.args.output_dir))
                found = resumable_checkpoint(wanted, trainer.args.output_dir)
                if found is not None:
                    require_loadable(trainer, found)
                set_aside_later(trainer.args.output_dir, found)
                return found

            self._resumed_at = None
            checkpoint = on_main_process(open_output)
            if checkpoint is not None:
                self._resumed_at = step_of(checkpoint)
            trainer.checkpoints.begin_training()
            try:
                with self._end_recorded():
                    yield checkpoint
            except DivergedError:
                raise
            except ServerError as error:  # in all processes together
                stops = [each for each in trainer.callback_handler.callbacks if isinstance(each, StopSignals)]
                signum = max((stop.common_signal() for stop in stops), default=0)
                way_back = trainer.checkpoints.save_after_failure(together=True)
                if signum:  # which has ended the request
                    raise RunInterrupted(signum, way_back) from error
                raise ServerError(f"{error} {way_back}") from error
            except RunInterrupted as stop:
                raise RunInterrupted(stop.signum, trainer.checkpoints.way_back()) from stop
            except BaseException as error:
                if checkpoint is not None or trainer.state.global_step > 0:
                    error.add_note(trainer.checkpoints.save_after_failure(together=False))
                raise

    @contextmanager
    def _end_recorded(self) -> Iterator[None]:
        """Write into the history what ends the training before its time."""
        try:
            yield
        except BaseException as error:
            name = signal.Signals(error.signum).name if isinstance(error, RunInterrupted) else type(error).__name__
            for each in self._trainer.callback_handler.callbacks:
                if isinstance(each, HistoryCallback):
                    each.ended(self._trainer.state.global_step, name)
            raise

    @property
    def resumed_at_end(self) -> bool:
        """Whether the present training resumed a run whose steps were all done."""
        return self._resumed_at is not None and self._resumed_at >= self._trainer.state.max_steps

    def epochs(self, epochs: int, steps: int) -> int:
        """Return the epochs of the present training, which are none where its steps are all done.

        transformers would otherwise make one step of the last epoch.
        """
        if self._resumed_at is None or self._resumed_at < steps:
            return epochs
        logger.warning(
            f"All {steps} steps of this run are done (step {self._resumed_at} of resume_from_checkpoint): nothing is "
            "trained. For more steps raise max_steps or num_train_epochs."
        )
        return 0
