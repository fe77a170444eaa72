"""Trains a policy with DC-GRPO.

    dc-trl train --config quickstart
    dc-trl train --config my_run.yaml --learning_rate 2e-6 --seed 1

A configuration is a YAML file of the fields below, or the name of one that ships. Each field can be given on the
command line too, where it overrides the file. Several processes: `accelerate launch -m dc_trl train --config FILE`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields

from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig, ModelConfig

from ..config import DCGRPOConfig
from ..resuming.interruption import StopSignals
from ..serving.errors import ServerError
from ..settings.command_line import refused_in_one_line, say
from ..settings.configuration import ConfigurationParser
from ..trainer import DCGRPOTrainer
from ..training.adapter import AdapterArguments
from ..training.arguments import ARGUMENTS, RunArguments
from ..training.banner import banner
from ..training.build import build_trainer
from ..training.own_server import ServerArguments
from ..training.problems import DataArguments
from ..training.run import Outcome, run
from ..training.watch import WatchArguments


# Classes of fields in the order of the help, and the title of their group.
_TITLES = {
    DCGRPOConfig: "DC-GRPO",
    DataArguments: "problems and rewards",
    ServerArguments: "a vLLM server that the run starts",
    WatchArguments: "learning rate and alarm",
    AdapterArguments: "an adapter to go on from",
    GRPOConfig: "TRL's GRPOConfig",
    ModelConfig: "TRL's ModelConfig",
    TrainingArguments: "transformers' TrainingArguments",
}


def make_parser() -> ConfigurationParser:
    return ConfigurationParser(ARGUMENTS)


def field_groups() -> dict[str, str]:
    """Return the title of each field's group, in the order of the help; the class that declares the field decides."""
    titles: dict[type, list[str]] = {owner: [] for owner in _TITLES}
    for config in ARGUMENTS:
        for field in fields(config):
            theirs = config is DCGRPOConfig and field.name in GRPOConfig.__dataclass_fields__  # maybe with our default
            classes = (GRPOConfig if theirs else config).__mro__
            said = next(each for each in classes if field.name in inspect.get_annotations(each))
            library = said.__module__.partition(".")[0]
            owners = (each for each in _TITLES if issubclass(each, said) and each.__module__.startswith(library))
            titles[next(owners)].append(field.name)
    return {name: _TITLES[owner] for owner, names in titles.items() for name in names}


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


def main(words: Sequence[str] | None = None) -> None:
    outcome = train(words)
    if outcome is not None:
        sys.exit(outcome)
