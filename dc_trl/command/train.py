"""Trains a policy with DC-GRPO.

    dc-trl train --config quickstart
    dc-trl train --config my_run.yaml --learning_rate 2e-6 --seed 1

A configuration is a YAML file of the fields below, or the name of one that ships. Each field can be given on the
command line too, where it overrides the file. Several processes: `accelerate launch -m dc_trl train --config FILE`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..serving.errors import ServerError
from ..settings.command_line import refused_in_one_line
from .short_help import short_help


if TYPE_CHECKING:
    from transformers import TrainerCallback

    from ..settings.configuration import ConfigurationParser
    from ..trainer import DCGRPOTrainer
    from .finish import Outcome


def train(
    words: Sequence[str] | None = None, callback: Callable[[DCGRPOTrainer], TrainerCallback] | None = None
) -> Outcome:
    """Train as a command line says, by default that of the process; return the same as `run`.

    Args:
        words: words of the command line.
        callback: function that makes a further callback for the trainer.
    """
    given = sys.argv[1:] if words is None else [*words]
    if not given:
        sys.exit("error: no setting is given: name a configuration by --config; dc-trl train --help lists the fields.")
    if given[-1] in ("-h", "--help"):
        print(short_help(max(shutil.get_terminal_size((120, 24)).columns, 80)))
        sys.exit(0)
    from ..run.interruption import StopSignals  # these take seconds, for which a help need not wait
    from .arguments import RunArguments

    sys.path.append(os.getcwd())  # the user's own reward functions are here
    with StopSignals() as signals, ExitStack() as stack:
        with refused_in_one_line(TypeError, ServerError):
            arguments = RunArguments.parse(given)
            from .build import build_trainer  # takes seconds more, for which a refusal need not wait
            from .finish import run

            trainer, alarm = build_trainer(arguments, stack)
        if callback is not None:
            trainer.add_callback(callback(trainer))
        return run(trainer, alarm, arguments.data, signals, stack)


def make_parser() -> ConfigurationParser:
    """Return the parser of all settings."""
    from .arguments import make_parser

    return make_parser()


main = train
