"""Describes the options of a sub-command, so that a parser is made of them without torch and TRL.

    python -m dc_trl.command.describe NAME

A description holds `description`, the text above the options, and `groups`, by the title of a group the names and the
arguments of `add_argument` of each option. That of `train` also holds `types`, the type of each field, and `defaults`,
that of each field of `DCGRPOConfig`.
"""

import argparse
import functools
import operator
import pickle
import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..records.settings import default_of, json_value
from ..settings.fields import kinds_of, ranges_of
from ..settings.generated import keep_description
from ..settings.values import truth


_MANY = 6  # choices that are listed in the help's text and not in the option's first line
_METAVARS: dict[Any, str] = {int: "N", float: "X", truth: "true|false", Path: "PATH"}
# What the types of fields are made of, apart from enumerations and classes that no configuration file can write.
_KINDS = (int, float, bool, str, dict, list, Literal, NoneType)
# TRL's parser takes it out of the command line.
_CONFIG = {
    "dest": "config",
    "help": "YAML file of the fields below, or the name of a configuration that ships",
    "metavar": "NAME_OR_FILE",
}


def describe(name: str) -> dict[str, Any]:
    """Return the description of a sub-command, and keep it. This imports the sub-command."""
    module = import_module(f".{name.replace('-', '_')}", __package__)
    parser = module.make_parser()
    description: dict[str, Any] = {"description": module.__doc__ or ""}
    if name == "train":
        described = _described(
            parser,
            module.field_groups(),
            {name: str(range_) for part in module.ARGUMENTS for name, range_ in ranges_of(part).items()},
        )
        description["groups"] = {"the configuration": [(["--config"], _CONFIG)], **described}
        listed = {option["dest"] for options in described.values() for _, option in options}
        hints = {name: kind for part in module.ARGUMENTS for name, kind in get_type_hints(part).items()}
        description["types"] = {name: _plain(kind) for name, kind in hints.items() if name in listed}
        description["defaults"] = {field.name: json_value(default_of(field)) for field in fields(module.DCGRPOConfig)}
    else:
        description["groups"] = _described(parser, {}, {})
    keep_description(name, description)
    return description


def _plain(kind: Any) -> Any:
    """Return an annotation made of Python's own types, which can be loaded without the libraries of the others."""
    kinds = [str if isinstance(each, type) and issubclass(each, Enum) else each for each in kinds_of(kind)]
    kinds = [each for each in kinds if (get_origin(each) or each) in _KINDS]
    kinds = [list[_plain(get_args(each)[0])] if get_origin(each) is list else each for each in kinds]  # type: ignore[misc]
    return functools.reduce(operator.or_, kinds)


def _described(
    parser: argparse.ArgumentParser, group_of: Mapping[str, str], ranges: Mapping[str, str]
) -> dict[str, list[tuple[list[str], dict[str, Any]]]]:
    """Return names and arguments of a parser's options by the title of their group.

    Args:
        parser: of a sub-command.
        group_of: title of the group of each field of a dataclass; empty where the parser's own groups count.
        ranges: by the name of a field what its number may be.
    """
    groups: dict[str, list[Any]] = {title: [] for title in group_of.values()}
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.dest != "help":
                title = group_of.get(action.dest) or group.title or "options"
                note = _note(action, ranges.get(action.dest)) if group_of else ""
                groups.setdefault(title, []).append(_option(action, note))
    return {title: options for title, options in groups.items() if options}


def _note(action: argparse.Action, range_: str | None) -> str:
    """Return the default and the range of a field, in brackets."""
    value = action.default.value if isinstance(action.default, Enum) else action.default
    known = [] if value is None or value in ([], "", argparse.SUPPRESS) else [f"default: {value}"]
    parts = "; ".join([*known, *([range_] if range_ else [])])
    return f"({parts})".replace("%", "%%") if parts else ""


def _option(action: argparse.Action, note: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an option and its other arguments, without `help` where it is not shown."""
    names = [name for name in action.option_strings if "-" not in name[2:]]  # transformers adds --some-field
    complement = names and names[0].startswith("--no_") and names[0] != f"--{action.dest}"
    hidden = action.help == argparse.SUPPRESS or (complement and (note or action.help is None))
    option: dict[str, Any] = {} if hidden else {"help": " ".join(filter(None, [action.help, note]))}
    if names:
        option |= {"dest": action.dest, "required": action.required}
    if action.nargs == 0:
        return names, option | {"action": "store_true", "default": None}
    kind: Any = truth if getattr(action.type, "__name__", "") == "string_to_bool" else action.type
    option |= {"nargs": action.nargs, "type": kind if kind in (int, float, truth) else str}
    if action.choices is None:
        option["metavar"] = action.metavar or (_METAVARS.get(kind, "TEXT") if names else None)
    else:
        option["choices"] = [str(choice) for choice in action.choices]
        if len(option["choices"]) > _MANY:
            option |= {
                "metavar": "NAME",
                "help": f"{option.get('help', argparse.SUPPRESS)} One of: {', '.join(option['choices'])}.",
            }
    return names or [action.dest], option


if __name__ == "__main__":
    print(pickle.dumps(describe(sys.argv[1])).hex())
