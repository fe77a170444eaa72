"""The parser of a training configuration, which its user writes in YAML and on a command line."""

import sys
from collections.abc import Iterable
from typing import Any, get_type_hints

from trl import TrlParser

from ..files import read_yaml
from .command_line import misspelt
from .paths import config_file
from .values import values_of


class ConfigurationParser(TrlParser):
    """TRL's parser, which reads YAML and command line into dataclasses; it refuses with a `ValueError`.

    It also refuses what a configuration file would silently turn into something else: a key that stands there twice,
    a word such as `no` that YAML reads as a truth value, another type than the field's.
    """

    def __init__(self, dataclass_types: Iterable[type]) -> None:
        super().__init__(dataclass_types, allow_abbrev=False)

    def error(self, message: str) -> None:
        """Raise a `ValueError`; argparse would print the usage of 300 fields and end the program."""
        raise ValueError(message if message.endswith("?") else f"{message}.")

    def parse_args_and_config(self, args: Iterable[str] | None = None, *positional: Any, **kwargs: Any) -> tuple:
        """Parse as `TrlParser` does.

        Raises:
            ValueError: names the file, or the field with its value.
            OSError: the configuration file cannot be read.
        """
        given = list(sys.argv[1:] if args is None else args)
        # TRL's parser knows `--config FILE`, and not `--config=FILE`.
        words = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if words.count("--config") > 1:
            raise ValueError("config is given twice: name one file, and override its fields on the command line.")
        if "--config" in words:
            behind = words.index("--config") + 1
            if not words[behind:]:
                raise ValueError("config is not set: name a YAML file behind --config.")
            self._file = config_file(words[behind])
            words[behind] = str(self._file)
            read_yaml(self._file)
        if wrong := misspelt([word for word in words if word != "--config"], self):
            raise ValueError(f"{wrong}.")
        return super().parse_args_and_config(words, *positional, **kwargs)

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Take over the values of the configuration file, each in the type of its field (a hook of `TrlParser`)."""
        types = {name: kind for part in self.dataclass_types for name, kind in get_type_hints(part).items()}
        options = {action.dest for action in self._actions}
        known = {name: kind for name, kind in types.items() if name in options}
        return super().set_defaults_with_config(**values_of(settings, known, self._file))
