"""The parser of a training configuration, which its user writes in YAML and on a command line."""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, get_origin, get_type_hints

from transformers import HfArgumentParser

from ..files import read_yaml
from .command_line import unknown_field
from .field_help import FieldHelp, Groups
from .fields import kinds_of
from .paths import config_file


class ConfigurationParser(HfArgumentParser):
    """The parser of transformers, which fills dataclasses, from YAML too; it refuses with a `ValueError`.

    Args:
        dataclass_types: whose fields may be set.
        groups: fields that the help shows, by the title of their group.
    """

    def __init__(self, dataclass_types: Iterable[type], groups: Groups) -> None:
        usage = "dc-trl train --config NAME_OR_FILE [--field value ...]"
        super().__init__(dataclass_types, usage=usage, allow_abbrev=False, add_help=False)
        self.add_argument("--config", help="YAML file of the fields below, which override it, or the name of one")
        self.add_argument("-h", "--help", action=FieldHelp, groups=groups)

    def error(self, message: str) -> None:
        """Raise a `ValueError`; argparse would print the usage of 300 fields and end the program."""
        raise ValueError(f"{message}.")

    def parse(self, words: Sequence[str] | None = None) -> tuple:
        """Return the dataclasses from a command line, by default that of the process, and the file of `--config`.

        Raises:
            ValueError: names the file, or the field with its value.
            OSError: the configuration file cannot be read.
        """
        given, others = self.parse_known_args(words)
        for name in (word.partition("=")[0] for word in others):
            if name.startswith("--"):
                raise ValueError(unknown_field(name, self._option_string_actions))
        if given.config is not None:
            types = {name: kind for part in self.dataclass_types for name, kind in get_type_hints(part).items()}
            settings = read_yaml(config_file(given.config))
            for name in settings:
                if name not in types:
                    raise ValueError(unknown_field(name, types))
            self.set_defaults(**{name: _meant(value, types[name]) for name, value in settings.items()})
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
