"""Trains a policy with DC-GRPO.

    accelerate launch scripts/train.py --config configs/quickstart.yaml [--any_field value ...]

Every field of the configuration file can be overridden on the command line; `--help` lists them all.
"""

import os
import sys
from contextlib import ExitStack

from dc_trl.resuming.interruption import StopSignals
from dc_trl.serving.errors import ServerError
from dc_trl.settings.command_line import refused_in_one_line
from dc_trl.training.arguments import RunArguments
from dc_trl.training.build import build_trainer
from dc_trl.training.run import run


def main() -> None:
    sys.path.append(os.getcwd())  # where reward functions of one's own stand
    with StopSignals() as signals, ExitStack() as stack:
        with refused_in_one_line(TypeError, ServerError):
            arguments = RunArguments.parse()
            trainer, alarm = build_trainer(arguments, stack)
        outcome = run(trainer, alarm, arguments.data, signals, stack)
        if outcome is not None:
            sys.exit(outcome)


if __name__ == "__main__":
    main()
