"""The parser of a training configuration, which its user writes in YAML and on a command line."""

import sys
from collections.abc import Iterable
from datetime import date
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trl import TrlParser

from ..files import read_yaml
from .command_line import unknown_field
from .fields import kinds_of
from .paths import config_file


_DESCRIPTION = (
    "Train a policy with DC-GRPO. A configuration is a YAML file of the fields below, or the name of one that ships. "
    "Each field can be given on the command line too, where it overrides the file."
)


class ConfigurationParser(TrlParser):
    """TRL's parser, which reads YAML and command line into dataclasses; it refuses with a `ValueError`.

    It also refuses what a configuration file would silently turn into something else: a key that stands there twice,
    or a word such as `no` that YAML reads as a truth value.
    """

    def __init__(self, dataclass_types: Iterable[type]) -> None:
        usage = "dc-trl train --config NAME_OR_FILE [--field value ...]"
        super().__init__(dataclass_types, usage=usage, description=_DESCRIPTION, allow_abbrev=False)

    def error(self, message: str) -> None:
        """Raise a `ValueError`; argparse would print the usage of 300 fields and end the program."""
        raise ValueError(f"{message}.")

    def parse_args_and_config(self, args: Iterable[str] | None = None, *positional: Any, **kwargs: Any) -> tuple:
        """Parse as `TrlParser` does.

        Raises:
            ValueError: names the file, or the field with its value.
            OSError: the configuration file cannot be read.
        """
        given = list(sys.argv[1:] if args is None else args)
        # TRL's parser knows `--config FILE`, and not `--config=FILE`.
        words = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if "--config" in words:
            behind = words.index("--config") + 1
            if not words[behind:]:
                raise ValueError("config is not set: name a YAML file behind --config.")
            file = config_file(words[behind])
            words[behind] = str(file)
            read_yaml(file)
        options = self._option_string_actions.keys() | {"--config", "--"}
        for name in (word.partition("=")[0] for word in words):
            if name.startswith("--") and name not in options:
                raise ValueError(unknown_field(name, options))
        return super().parse_args_and_config(words, *positional, **kwargs)

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Take over the values of the configuration file, each in the type of its field (a hook of `TrlParser`)."""
        types = {name: kind for part in self.dataclass_types for name, kind in get_type_hints(part).items()}
        for name in settings:
            if name not in types:
                raise ValueError(unknown_field(name, types))
        return super().set_defaults_with_config(
            **{name: _meant(name, settings[name], types[name]) for name in settings}
        )


def _meant(name: str, value: Any, kind: Any) -> Any:
    """Return what YAML has read as the field has it. The parser itself reads numbers and truth values from text."""
    kinds = kinds_of(kind)
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    takes_text = any(each is str or (isinstance(each, type) and issubclass(each, Enum)) for each in kinds)
    if isinstance(value, bool) and bool not in kinds and (choices or takes_text):
        words = ("on", "yes", "true") if value else ("off", "no", "false")
        if meant := [word for word in words if word in choices]:
            return meant[0]
        if takes_text and name != "scale_rewards":  # which TRL reads as text and as a truth value
            raise ValueError(
                f"{name}={value!r}: YAML reads yes, no, on and off as truth values. Write the word in quotes, as in "
                f"{name}: '{words[1]}'."
            )
    if takes_text and isinstance(value, list | dict) and not any(get_origin(each) or each is dict for each in kinds):
        raise ValueError(f"{name}={value!r} is invalid: use text.")
    if any(get_origin(each) is list for each in kinds) and not takes_text and value is not None:
        value = value if isinstance(value, list) else [value]  # a command line takes one word as a list too
        return [str(each) if list[str] in kinds else each for each in value]
    if takes_text and not {int, float} & {*kinds} and isinstance(value, int | float | date):
        return value if isinstance(value, bool) else str(value)  # a GPU's number, a run's name
    return value
