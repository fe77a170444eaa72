"""Values of a configuration file in the types of their fields. What does not fit is refused by its name."""

import functools
import json
import operator
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ..files import line_of
from .command_line import unknown_field
from .fields import in_words, kinds_of


# Words that transformers' parser reads as truth values.
TRUTH_VALUES = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")
# Text fields whose truth values TRL reads too.
_ALSO_TRUTH_VALUES = ("scale_rewards",)
# Types of fields by the names that a description has for them.
_NAMED: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, bool, str, dict)},
    "list[int]": list[int],
    "list[float]": list[float],
    "list[str]": list[str],
    "None": NoneType,
}


def values_of(settings: Mapping[str, Any], types: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings that YAML has read from a file as values of their fields, of which `types` has all.

    Raises:
        ValueError: there is no such field, or it has another type; the message has file and line, the field, its
            value and what to write.
    """
    found = {}
    for name, value in settings.items():
        try:
            if name not in types:
                raise ValueError(unknown_field(name, types))
            found[name] = _value(name, value, types[name])
        except ValueError as error:
            raise ValueError(f"{file}, line {line_of(file, name)}: {error}") from None
    return found


def written(kind: Any) -> str:
    """Return an annotation as one line: the types that a field may have, a `Literal` as a JSON list of its choices."""
    return " | ".join(dict.fromkeys(word for each in kinds_of(kind) if (word := _written(each))))


def _written(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return json.dumps(get_args(kind))
    if origin is list:
        (item,) = get_args(kind)
        return f"list[{_written(item)}]"
    if isinstance(origin, type) and issubclass(origin, Enum):
        return "str"
    return next((name for name, known in _NAMED.items() if known is origin), "")


def type_of(line: str) -> Any:
    """Return the annotation that `written` has turned into this line."""
    kinds = [Literal[tuple(json.loads(word))] if word[0] == "[" else _NAMED[word] for word in line.split(" | ")]
    return functools.reduce(operator.or_, kinds)


def _value(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a field from what YAML has read. The parser reads numbers from text later."""
    kinds = kinds_of(kind)
    if get_origin(kind) is Literal and isinstance(value, bool):
        written = ("yes", "on", "true") if value else ("no", "off", "false")
        if meant := [word for word in get_args(kind) if word in written]:
            return meant[0]
    if str not in kinds and list in [get_origin(each) for each in kinds] and not isinstance(value, list | None):
        value = [value]  # a command line takes one word as a list too
    if any(_fits(value, each) for each in kinds) or (name in _ALSO_TRUTH_VALUES and isinstance(value, bool)):
        return value
    as_text = _as_text(value)
    if any(_fits(as_text, each) for each in kinds):
        return as_text
    hint = ""
    if isinstance(value, bool) and str in kinds:
        word = "true" if value else "no"
        hint = f" in quotes, as in {name}: '{word}' (YAML reads yes, no, on, off, true and false as truth values)"
    raise ValueError(f"{name}={value!r} is invalid: use {' or '.join(dict.fromkeys(map(in_words, kinds)))}{hint}.")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        (item,) = get_args(kind) or (Any,)
        return isinstance(value, list) and all(_fits(each, item) for each in value)
    if origin in (int, float):
        number = Integral if origin is int else Real
        # YAML reads 1e-6, without point, as text.
        return _reads(origin, value) or (isinstance(value, number) and not isinstance(value, bool))
    if origin is bool:
        return isinstance(value, bool) or (isinstance(value, str) and value.lower() in TRUTH_VALUES)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return isinstance(value, str)
    return origin is Any or isinstance(value, origin)


def _reads(kind: type[int] | type[float], value: Any) -> bool:
    """Return whether the parser of a command line reads a number from this text."""
    with suppress(ValueError):
        return isinstance(value, str) and kind(value) is not None
    return False


def _as_text(value: Any) -> Any:
    """Return numbers and dates as text, also those of a list: a GPU's number, a run's name."""
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return value if value is None or isinstance(value, bool | dict) else str(value)
