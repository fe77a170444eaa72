"""Trains a policy with DC-GRPO.

    dc-trl train --config quickstart
    dc-trl train --config my_run.yaml --learning_rate 2e-6 --seed 1

A configuration is a YAML file of the fields below, or the name of one that ships. Each field can be given on the
command line too, where it overrides the file. Several processes: `accelerate launch -m dc_trl train --config FILE`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from ..run.interruption import StopSignals
from ..serving.errors import ServerError
from ..settings.command_line import refused_in_one_line
from ..training.arguments import RunArguments
from ..training.arguments import make_parser as make_parser


if TYPE_CHECKING:
    from ..trainer import DCGRPOTrainer
    from ..training.run import Outcome


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
            from ..training.build import build_trainer  # takes seconds, for which --help and a refusal need not wait
            from ..training.run import run

            trainer, alarm = build_trainer(arguments, stack)
        if callback is not None:
            trainer.add_callback(callback(trainer))
        return run(trainer, alarm, arguments.data, signals, stack)


main = train
