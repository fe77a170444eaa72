"""All settings of a training run, those of TRL too, which its user writes in YAML and on a command line."""

import os
import re
import sys
from argparse import Action
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, get_origin, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool
from trl import ModelConfig

from ..config import DCGRPOConfig
from ..files import read_yaml
from ..settings.command_line import NEGATIVE_NUMBER, described, say, unknown_field
from ..settings.distribution import sharding_of
from ..settings.fields import allowed_of, kinds_of
from ..settings.paths import config_file, shipped
from ..settings.recipes import DECIDED
from .own_arguments import DataArguments, ServerArguments, WatchArguments


class RunArguments(NamedTuple):
    """The dataclasses whose fields a configuration file and a command line may set."""

    data: DataArguments
    server: ServerArguments
    watch: WatchArguments
    trainer: DCGRPOConfig
    model: ModelConfig

    @classmethod
    def parse(cls, words: Sequence[str]) -> "RunArguments":
        """Read the words of a command line, and the file that its `--config` names.

        Raises:
            ValueError: a setting or the file is refused; the message names the file, or the field with its value.
            OSError: the file cannot be read.
        """
        arguments = cls(*ConfigurationParser().parse(words))
        if arguments.model.model_name_or_path is not None:
            arguments.model.model_name_or_path = shipped(arguments.model.model_name_or_path)
        return arguments


ARGUMENTS: tuple[type, ...] = tuple(RunArguments.__annotations__.values())


def require_servable(server: ServerArguments, args: DCGRPOConfig) -> None:
    """Refuse a server that the settings would not use."""
    named = args.vllm_server_base_url or args.vllm_server_base_urls
    if server.serve is not None and (named is not None or not args.use_vllm or args.vllm_mode != "server"):
        raise ValueError(
            f"serve={server.serve!r} starts a server that nothing uses with use_vllm={args.use_vllm}, vllm_mode="
            f"{args.vllm_mode!r} and the address {named!r}: leave serve out, or set use_vllm=true, vllm_mode=server "
            "and no address."
        )
    quantizes = args.deployment_scheme not in (None, "bf16")
    if server.serve is not None and quantizes and sharding_of(args) == ("DEEPSPEED", 3):
        raise ValueError(
            f"serve={server.serve!r} loads the model in one process, which ZeRO-3 cannot: start it by dc-trl serve "
            f"--scheme {args.deployment_scheme}, and give its address in vllm_server_base_url."
        )


class ConfigurationParser(HfArgumentParser):
    """The parser of transformers, which fills the dataclasses of `ARGUMENTS`; it refuses with a `ValueError`."""

    def __init__(self) -> None:
        super().__init__(ARGUMENTS, allow_abbrev=False, add_help=False)
        self._negative_number_matcher = NEGATIVE_NUMBER
        self.add_argument("--config", help="YAML file of the fields below, or the name of a shipped one")
        self.add_argument("-h", "--help", nargs="?", const="all", help="'all' lists all fields, a name describes one")
        self._checked = {name for kind in self.dataclass_types for name in allowed_of(kind)}

    def help_on(self, word: str) -> str:
        """Return the help: for "all" every field in full, otherwise the field named."""
        every = reversed(self._option_string_actions.values())  # --no_NAME comes after --NAME
        actions = {action.dest: action for action in every}
        if word not in ("all", *actions):
            raise ValueError(unknown_field(word, actions))
        named = actions.values() if word == "all" else [actions[word]]
        lines = []
        for action in named:
            kind = bool if action.type is string_to_bool else action.type
            lines.append(described(action.dest, kind, action.help or "", None, action.choices, action.default))
        return "\n".join(lines)

    def _check_value(self, action: Action, value: Any) -> None:
        if action.dest not in self._checked:  # their dataclasses refuse in the same words what a file or Python gives
            super()._check_value(action, value)

    def error(self, message: str) -> None:
        """Raise a `ValueError`; argparse would print the usage of 300 fields and end the program."""
        raise ValueError(re.sub(r"^argument --(\w+)(/\S+)?:", r"\1:", message) + ".")

    def parse(self, words: Sequence[str]) -> tuple:
        """Return the dataclasses from the words of a command line, and the file of its `--config`.

        `--help` prints the help and ends the program.

        Raises:
            ValueError: names the file, or the field with its value.
            OSError: the configuration file cannot be read.
        """
        given, others = self.parse_known_args(words)
        if given.help is not None:
            print(self.help_on(given.help))
            sys.exit(0)
        if others:
            raise ValueError(unknown_field(others[0].partition("=")[0], self._option_string_actions))
        if given.config is None:
            return self._fill(words)
        types = {name: kind for part in self.dataclass_types for name, kind in get_type_hints(part).items()}
        file = config_file(given.config)
        settings = read_yaml(file)
        said = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
        try:
            for name in settings:
                if name not in types:
                    raise ValueError(unknown_field(name, types))
            # A recipe that comes later than the file decides over what the file says of its fields.
            if "recipe" in said and given.recipe != settings.get("recipe", "trl"):
                overruled = settings.keys() & DECIDED - said
                if overruled and os.environ.get("RANK", "0") == "0":
                    listed = ", ".join(f"{name}={settings[name]!r}" for name in sorted(overruled))
                    say(f"recipe={given.recipe!r} of the command line replaces {listed} of {given.config}")
                settings = {name: value for name, value in settings.items() if name not in overruled}
            self.set_defaults(**{name: _meant(value, types[name]) for name, value in settings.items()})
            return self._fill(words)
        except ValueError as error:
            refused = re.split(r"\W", str(error), maxsplit=1)[0]
            if refused not in settings or refused in said:
                raise
            raise ValueError(f"{file}: {error}") from error

    def _fill(self, words: Sequence[str]) -> tuple:
        return self.parse_args_into_dataclasses(words, look_for_args_file=False)[: len(self.dataclass_types)]


def _meant(value: Any, kind: Any) -> Any:
    """Return what YAML has read as the field has it. The parser itself reads numbers and truth values from text."""
    kinds = kinds_of(kind)
    takes_text = any(each is str or (isinstance(each, type) and issubclass(each, Enum)) for each in kinds)
    if any(get_origin(each) is list for each in kinds) and not takes_text and value is not None:
        values = value if isinstance(value, list) else [value]  # a command line takes one word as a list too
        return [str(each) if list[str] in kinds else each for each in values]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and takes_text and not {int, float} & {*kinds} else value  # a GPU's number
