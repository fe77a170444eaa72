"""A training configuration as its user writes it, in YAML and on a command line; what is wrong in it is named."""

import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trl import TrlParser

from ..files import read_yaml
from .command_line import misspelt, unknown_field
from .paths import config_file


# Text fields whose truth values TRL reads too.
_ALSO_TRUTH_VALUES = ("scale_rewards",)


class ConfigurationParser(TrlParser):
    """TRL's parser, which reads YAML and command line into dataclasses. Whatever it refuses is a `ValueError`.

    Of a configuration file it also refuses what would silently be something else: a key that stands twice, a truth
    value where YAML reads `no` or `off` as one, another type than the field's.
    """

    def __init__(self, dataclass_types: Iterable[type]) -> None:
        super().__init__(dataclass_types, allow_abbrev=False)

    def error(self, message: str) -> None:
        """Raises a `ValueError`, where argparse would print the usage of 300 fields and end the program."""
        raise ValueError(message if message.endswith("?") else f"{message}.")

    def parse_args_and_config(self, args: Iterable[str] | None = None, *positional: Any, **kwargs: Any) -> tuple:
        """See `TrlParser`.

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
            words[behind] = str(config_file(words[behind]))
            read_yaml(Path(words[behind]))
        if wrong := misspelt([word for word in words if word != "--config"], self):
            raise ValueError(f"{wrong}.")
        return super().parse_args_and_config(words, *positional, **kwargs)

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Takes over what the configuration file says. TRL's hook."""
        return super().set_defaults_with_config(**self.checked(settings))

    def checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a configuration file as values of their fields.

        Raises:
            ValueError: there is no such field, or it takes another type.
        """
        types = {name: kind for part in self.dataclass_types for name, kind in get_type_hints(part).items()}
        known = {action.dest for action in self._actions} & types.keys()
        values = {}
        for name, value in settings.items():
            if name not in known:
                raise ValueError(unknown_field(name, known))
            values[name] = _value(name, value, types[name])
        return values


def _value(name: str, value: Any, kind: Any) -> Any:
    """The value of a field, from what YAML makes of it. Numbers in text are for the parser, which reads them."""
    kinds = list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]
    if get_origin(kind) is Literal and isinstance(value, bool):
        written = ("yes", "on", "true") if value else ("no", "off", "false")
        if meant := [word for word in get_args(kind) if word in written]:
            return meant[0]
    if str not in kinds and list in [get_origin(each) for each in kinds] and not isinstance(value, list | None):
        value = [value]  # as one word on a command line
    if any(_fits(value, each) for each in kinds) or (name in _ALSO_TRUTH_VALUES and isinstance(value, bool)):
        return value
    as_text = _as_text(value)
    if any(_fits(as_text, each) for each in kinds):
        return as_text
    hint = ""
    if isinstance(value, bool) and str in kinds:
        word = "true" if value else "no"
        hint = f" in quotes, as in {name}: '{word}' (YAML reads yes, no, on, off, true and false as truth values)"
    raise ValueError(f"{name}={value!r} is invalid: use {' or '.join(dict.fromkeys(map(_words, kinds)))}{hint}.")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        (item,) = get_args(kind) or (Any,)
        return isinstance(value, list) and all(_fits(each, item) for each in value)
    if origin in (int, float):
        # Text is for the parser, which reads a number from it or refuses it. YAML reads 1e-6, without point, as text.
        number = Integral if origin is int else Real
        return isinstance(value, str) or (isinstance(value, number) and not isinstance(value, bool))
    if origin is bool:
        return isinstance(value, bool | str)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return isinstance(value, str)
    return origin is Any or isinstance(value, origin)


def _as_text(value: Any) -> Any:
    """Numbers and dates as they stand in the file, also those of a list: a GPU's number, a run's name."""
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return value if value is None or isinstance(value, bool | dict) else str(value)


def _words(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if origin is list:
        (item,) = get_args(kind) or (Any,)
        return f"a list of {_words(item)}s" if item is not Any else "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    return "nothing" if origin is NoneType else words.get(origin, "text")
