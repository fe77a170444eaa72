"""What `dc-trl train` does: from a command line to a run that has ended."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from transformers import TrainerCallback

from ..resuming.interruption import StopSignals
from ..serving.errors import ServerError
from ..settings.command_line import refused_in_one_line, say
from ..trainer import DCGRPOTrainer
from .arguments import RunArguments
from .banner import banner
from .build import build_trainer
from .run import Outcome, run


def train(
    words: Sequence[str] | None = None, callback: Callable[[DCGRPOTrainer], TrainerCallback] | None = None
) -> Outcome:
    """Trains as a command line says, that of the process by default; see `run` for what it returns.

    Args:
        words: of the command line.
        callback: makes a callback of the trainer, which goes on beside those of the configuration.
    """
    sys.path.append(os.getcwd())  # where reward functions of one's own stand
    with StopSignals() as signals, ExitStack() as stack:
        with refused_in_one_line(TypeError, ServerError):
            arguments = RunArguments.parse(words)
            trainer, alarm = build_trainer(arguments, stack)
        if trainer.accelerator.is_main_process:
            say(banner(trainer, arguments))
        if callback is not None:
            trainer.add_callback(callback(trainer))
        return run(trainer, alarm, arguments.data, signals, stack)
