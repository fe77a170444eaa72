"""Signals that end a run: it finishes its step, saves a checkpoint, and exits with the signal's exit code."""

import os
import signal
import sys
import time
from types import FrameType

import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback

from ..serving.background import abandon_requests, allow_requests, in_thread
from .manifest import way_back


# Ctrl-C, and those that ask a program to end: a job system's, a closed terminal's, and SLURM's warning of the time.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_DUPLICATE_SECONDS = 1.0  # seconds; a launcher forwards signals that have already reached all of its processes


class RunInterrupted(Exception):  # noqa: N818 (this is not an error)
    """A signal ended training, in all processes at the same step.

    Args:
        signum: number of the signal.
        way_back: sentence that says how to resume.
    """

    def __init__(self, signum: int, way_back: str = ""):
        super().__init__(f"{signal.Signals(signum).name} has ended the run. {way_back}".rstrip())
        self.signum = signum
        self.exit_code = 128 + signum


class StopSignals(TrainerCallback):
    """Makes SIGINT, SIGTERM, SIGHUP and SIGUSR1 end a run in order during a `with` block in the main thread.

    During training, the present step is finished, with the evaluation that is due, and saved. A request to a vLLM
    server ends at once, and the step or evaluation with it: then the last step that had ended is saved. Then
    [`RunInterrupted`] is raised in all processes, whichever of them the signal has reached. Before the first step and
    after the last one the process ends at once, by `RunInterrupted` or `SystemExit`. A second signal, more than a
    second after the first, ends the process. The exit code is 128 + the signal's number, such as 130 or 143. Signals
    that were ignored when the block began stay ignored; a shell does that for background processes.

    Add it to the trainer as the last callback.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._training = False
        self._output_dir = ""  # output directory of the present or last training
        self._steps = 0  # steps that have ended in that training
        self._signum = 0  # the signal that reached this process, or 0
        self._since = 0.0
        self._signal_of_all = 0  # the signal that reached any process, or 0

    def __enter__(self) -> "StopSignals":
        self._previous = {
            signum: signal.signal(signum, self._handle)
            for signum in _SIGNALS
            if signal.getsignal(signum) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        allow_requests()

    def on_train_begin(self, args, state, control, **kwargs):
        self._output_dir, self._steps = args.output_dir, state.global_step
        self._training = True

    def on_train_end(self, args, state, control, **kwargs):
        self._training = False

    def on_step_end(self, args, state, control, **kwargs):
        self._steps = state.global_step
        self._signal_of_all = self.common_signal()
        if self._signal_of_all:
            allow_requests()  # an evaluation may be due
            control.should_training_stop = control.should_save = True
            control.should_log = args.logging_strategy != "no"

    def on_prediction_step(self, args, state, control, **kwargs):
        if self._training and self._steps == 0 and (signum := self.common_signal()):
            raise RunInterrupted(signum)

    on_epoch_begin = on_prediction_step

    def on_epoch_end(self, args, state, control, **kwargs):
        # The last step has now been logged and saved.
        if self._signal_of_all:
            raise RunInterrupted(self._signal_of_all)

    def common_signal(self) -> int:
        """Return the signal that has reached any process, or 0. Every process must call it."""
        state = PartialState()
        if state.num_processes == 1:
            return self._signum
        return int(gather(torch.tensor([self._signum], device=state.device)).max())

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child; a terminal and SLURM send signals to all processes
            if signum == signal.SIGTERM:
                os._exit(128 + signum)
        elif not self._training:
            _write(signum, way_back(self._output_dir, self._steps))
            sys.exit(128 + signum)
        elif not self._signum:
            self._signum, self._since = signum, time.monotonic()
            _write(signum, "the run ends after this step; a second signal ends it at once.")
            in_thread(abandon_requests)  # the interrupted thread may hold its lock
        elif time.monotonic() - self._since > _DUPLICATE_SECONDS:
            _write(signum, f"ended at once. {way_back(self._output_dir, self._steps)}")
            os._exit(128 + self._signum)


def _write(signum: int, what: str) -> None:
    """Write to stderr, from the first process of a launch; the main thread may be using print's buffer."""
    if os.environ.get("RANK", "0") == "0":
        os.write(sys.stderr.fileno(), f"\n{signal.Signals(signum).name}: {what}\n".encode())
