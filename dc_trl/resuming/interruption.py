"""Signals that end a run: it finishes its step, saves a checkpoint, and exits with the signal's exit code."""

import os
import shlex
import signal
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from types import FrameType

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch.distributed.distributed_c10d import _get_default_store
from transformers import Trainer, TrainerCallback

from ..serving.background import abandon_requests, allow_requests, in_thread
from ..settings.command_line import ENDING
from .checkpoints import checkpoints


_SIGNALS = (signal.SIGINT, *ENDING)
_DUPLICATE_SECONDS = 1.0  # seconds; a launcher forwards signals that have already reached all of its processes
_POLL_SECONDS = 0.5  # interval of checks whether a signal has reached another process
BEGIN_AGAIN = "No step had ended, so nothing is lost: the same command begins again."


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

    During training, the present step is finished or the evaluation abandoned, and then [`RunInterrupted`] is raised in
    all processes, whichever of them the signal has reached. A request to a vLLM server ends at once, whichever process
    sent it, and the present step with it. [`DCGRPOTrainer`] then saves a checkpoint if a step has ended; a run that
    resumes from it begins with the abandoned evaluation. Before and after training, the process exits at once by
    `SystemExit`. A second signal, more than a second after the first, ends the process whatever it is doing. In each
    case the last line says how to resume. The exit code is 128 + the signal's number, such as 130 or 143. Signals that
    were ignored when the block began stay ignored; a shell does that for background processes.

    Add it to the trainer as the last callback.
    """

    def __init__(self) -> None:
        self._training = False
        self._output_dir = ""  # output directory of the present or last training
        self._steps = 0  # steps that have ended in that training
        self._signum = 0  # the signal that reached this process, or 0
        self._signal_of_all = 0  # the signal that reached any process, or 0

    def __enter__(self) -> "StopSignals":
        self._previous = {
            signum: signal.signal(signum, self._exit_unless_training)
            for signum in _SIGNALS
            if signal.getsignal(signum) is not signal.SIG_IGN
        }
        # Python runs handlers between its own instructions, which a process that waits in a collective for a dead one
        # does not reach, so a thread reads the signals.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(self._read,), daemon=True).start()
        _installed.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if kind is not None and self._training and not issubclass(kind, (RunInterrupted, SystemExit)):
            # A traceback follows, perhaps with a launcher's; they say what happened but not how to resume.
            _write(f"\n{kind.__name__} has ended the training. {self._way_back()}\n")
        _installed.remove(self)
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._write)  # ends the thread
        allow_requests()

    def on_train_begin(self, args, state, control, **kwargs):
        self._output_dir, self._steps = args.output_dir, state.global_step
        self._training = True
        if PartialState().num_processes > 1:
            self._store, self._key = _get_default_store(), f"dc_trl/signal/{next(_trainings)}"
            in_thread(self._listen)

    def on_train_end(self, args, state, control, **kwargs):
        self.check()
        self._training = False

    def on_step_end(self, args, state, control, **kwargs):
        self._steps = state.global_step
        self._signal_of_all = self._common_signal()
        if self._signal_of_all:
            control.should_training_stop = True
            control.should_log = args.logging_strategy != "no"

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.check()

    on_prediction_step = on_epoch_begin

    def on_epoch_end(self, args, state, control, **kwargs):
        # The last step has now been logged, and saved if it was due.
        if self._signal_of_all:
            raise RunInterrupted(self._signal_of_all)

    def check(self) -> None:
        """During training, raise [`RunInterrupted`] once a signal has reached a process. Call it in every process."""
        if self._training and (signum := self._common_signal()):
            raise RunInterrupted(signum)

    def _listen(self) -> None:
        """End the requests of this process once a signal has reached another one, which may wait for them."""
        while self._training and not self._signum:
            if self._store.check([self._key]):
                abandon_requests()
                return
            time.sleep(_POLL_SECONDS)

    def _announce(self) -> None:
        """Tell all processes of the signal, outside of the collectives in which they may wait."""
        self._store.set(self._key, "1")

    def _common_signal(self) -> int:
        state = PartialState()
        if state.num_processes == 1:
            return self._signum
        return int(gather(torch.tensor([self._signum], device=state.device)).max())

    def _exit_unless_training(self, signum: int, frame: FrameType | None) -> None:
        if not self._training:
            _write_signal(signum, self._way_back())
            sys.exit(128 + signum)

    def _watch(self, signals: int) -> None:
        first = 0.0
        while data := os.read(signals, 1):
            if data[0] not in _SIGNALS:
                continue  # other code has set a handler meanwhile
            if not self._signum:
                self._signum, first = data[0], time.monotonic()
                if self._training:
                    several = PartialState().num_processes > 1
                    # If a process has died, the others would wait for it; a launcher then sends them the signal.
                    died = f" If one of its processes has died: {self._way_back()}" if several else ""
                    now = "the run ends after this step or evaluation batch; a second signal ends it at once."
                    _write_signal(data[0], now + died)
                    abandon_requests()
                    if several:
                        in_thread(self._announce)  # may block, and a second signal must not wait
            elif time.monotonic() - first > _DUPLICATE_SECONDS:
                _write_signal(data[0], f"ended at once. {self._way_back()}")
                os._exit(128 + self._signum)
        os.close(signals)

    def _way_back(self) -> str:
        """Return how to resume if nothing more is saved."""
        if self._steps == 0:
            return BEGIN_AGAIN
        if checkpoints(self._output_dir):
            return f"Go on from the last checkpoint: {resume_command(self._output_dir)}."
        return f"No checkpoint was saved: start again in another output_dir, or remove {self._output_dir}."


def _write_signal(signum: int, what: str) -> None:
    _write(f"\n{signal.Signals(signum).name}: {what}\n")


def _write(line: str) -> None:
    """Write to stderr from the first living process of a launch on this machine."""
    # The main thread may be using print's buffer, so it is avoided.
    if _is_first():
        os.write(sys.stderr.fileno(), line.encode())


def _is_first() -> bool:
    rank = int(os.environ.get("RANK", "0"))  # set by launchers
    if rank == 0:
        return True
    if int(os.environ.get("GROUP_RANK", "0")) > 0:  # not on the first machine
        return False
    for process in psutil.Process(os.getppid()).children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE and int(process.environ().get("RANK", str(rank))) < rank:
                return False
    return True


def resume_command(output_dir: str) -> str:
    """Return the command that resumes from the newest checkpoint of an output directory."""
    return f"the same command with --output_dir {shlex.quote(output_dir)} --resume_from_checkpoint true"


def stop_if_asked(trainer: Trainer) -> None:
    """Call [`StopSignals.check`] at a point where the trainer's own loops do not, such as before an evaluation."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, StopSignals):
            callback.check()


_installed: list[StopSignals] = []
_trainings = count()  # equal in all processes, since they train together


def _leave_signals_to_parent() -> None:
    """Leave the pipe, and signals that a terminal or SLURM sends to all processes, to the parent of a forked child."""
    for signals in _installed:
        signal.set_wakeup_fd(-1)
        for signum in signals._previous:
            # SIGTERM to a child is meant for that child.
            signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.SIG_IGN)


os.register_at_fork(after_in_child=_leave_signals_to_parent)
