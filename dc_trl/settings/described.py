"""Reads the help of fields from the docstring of their dataclass. New fields use `setting` of fields.py instead."""

import inspect
import re
from dataclasses import fields
from types import MappingProxyType
from typing import TypeVar

from .fields import setting


__all__ = ["described", "setting"]

Settings = TypeVar("Settings", bound=type)

# "name (`type`, defaults to `value`):" and the indented text below it.
_ENTRY = re.compile(r"^    (\w+) \(.*\):\n((?: {8}.*\n?|\n)+)", re.MULTILINE)


def described(settings: Settings) -> Settings:
    """Gives the fields of a dataclass the help that its docstring has for them, under "Args:".

    Raises:
        TypeError: the docstring describes a field that is not there.
    """
    arguments = inspect.cleandoc(settings.__doc__ or "").partition("Args:\n")[2]
    known = {each.name: each for each in fields(settings)}
    for name, text in _ENTRY.findall(arguments):
        if name not in known:
            raise TypeError(f"{settings.__name__} describes {name}, which is none of its fields.")
        words = re.sub(r"`+", "", " ".join(text.split()))
        known[name].metadata = MappingProxyType({**known[name].metadata, "help": words})
    return settings
