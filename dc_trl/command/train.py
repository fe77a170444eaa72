"""Trains a policy with DC-GRPO.

    dc-trl train --config quickstart
    dc-trl train --config my_run.yaml --learning_rate 2e-6 --seed 1

A configuration is a YAML file of the fields below, or the name of one that ships. Each field can be given on the
command line too, where it overrides the file. Several processes: `accelerate launch -m dc_trl train --config FILE`.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import fields

from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig

from ..config import DCGRPOConfig
from ..settings.configuration import ConfigurationParser
from ..training.adapter import AdapterArguments
from ..training.arguments import ARGUMENTS
from ..training.command import train
from ..training.own_server import ServerArguments
from ..training.problems import DataArguments
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


def main(words: Sequence[str] | None = None) -> None:
    outcome = train(words)
    if outcome is not None:
        sys.exit(outcome)
