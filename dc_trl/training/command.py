"""The command `dc-trl train`, from its command line to the end of the run."""

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
    """Train as a command line says, by default that of the process; return the same as `run`.

    Args:
        words: words of the command line.
        callback: function that makes a further callback for the trainer.
    """
    sys.path.append(os.getcwd())  # the user's own reward functions are here
    with StopSignals() as signals, ExitStack() as stack:
        with refused_in_one_line(TypeError, ServerError):
            arguments = RunArguments.parse(words)
            trainer, alarm = build_trainer(arguments, stack)
        if trainer.accelerator.is_main_process:
            say(banner(trainer, arguments))
        if callback is not None:
            trainer.add_callback(callback(trainer))
        return run(trainer, alarm, arguments.data, signals, stack)
