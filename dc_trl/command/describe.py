"""Describes the options of a sub-command as JSON, from which a parser is made without torch and TRL.

    python -m dc_trl.command.describe NAME

A description holds `description`, the text above the options, and `groups`, the options by the title of their group.
That of `train` also holds `types`, the type of each field, and `defaults`, that of each field of `DCGRPOConfig`.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from ..records.settings import default_of, json_value
from ..settings.fields import ranges_of
from ..settings.values import written
from .options import TRUE_OR_FALSE


_KINDS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
# TRL's parser takes it out of the command line.
_CONFIG = {
    "names": ["--config"],
    "dest": "config",
    "help": "YAML file of the fields below, or the name of a configuration that ships",
    "kind": "NAME_OR_FILE",
}


def describe(name: str) -> dict[str, Any]:
    """Return the description of a sub-command, which is imported."""
    if name == "train":
        return _of_training()
    module = import_module(f".{name.replace('-', '_')}", __package__)
    return _described(module.make_parser(), module.__doc__ or "", {}, {})


def _of_training() -> dict[str, Any]:
    from . import train

    group_of = train.field_groups()
    ranges = {name: str(range_) for part in train.ARGUMENTS for name, range_ in ranges_of(part).items()}
    description = _described(train.make_parser(), train.__doc__ or "", group_of, ranges)
    description["groups"] = {"the configuration": [_CONFIG], **description["groups"]}
    listed = {option["dest"] for options in description["groups"].values() for option in options}
    types = {name: kind for part in train.ARGUMENTS for name, kind in get_type_hints(part).items() if name in listed}
    description["types"] = {name: written(kind) for name, kind in types.items()}
    description["defaults"] = {field.name: json_value(default_of(field)) for field in fields(train.DCGRPOConfig)}
    return description


def _described(
    parser: argparse.ArgumentParser, description: str, group_of: Mapping[str, str], ranges: Mapping[str, str]
) -> dict[str, Any]:
    """Describe a parser.

    Args:
        parser: of a sub-command.
        description: of the sub-command.
        group_of: title of the group of each field of a dataclass; empty where the parser's own groups count.
        ranges: by the name of a field what its number may be.
    """
    groups: dict[str, list[dict[str, Any]]] = {title: [] for title in group_of.values()}
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.dest != "help":
                title = group_of.get(action.dest) or group.title or "options"
                note = _note(action, ranges.get(action.dest)) if group_of else ""
                groups.setdefault(title, []).append(_option(action, note))
    return {"description": description, "groups": {title: options for title, options in groups.items() if options}}


def _note(action: argparse.Action, range_: str | None) -> str:
    """Return the default and the range of a field, in brackets."""
    value = action.default.value if isinstance(action.default, Enum) else action.default
    known = [] if value is None or value in ([], "", argparse.SUPPRESS) else [f"default: {value}"]
    parts = "; ".join([*known, *([range_] if range_ else [])])
    return f"({parts})".replace("%", "%%") if parts else ""


def _option(action: argparse.Action, note: str) -> dict[str, Any]:
    names = [name for name in action.option_strings if "-" not in name[2:]]  # transformers adds --some-field
    option: dict[str, Any] = {"names": names or [action.dest], "dest": action.dest}
    complement = names and names[0].startswith("--no_") and names[0] != f"--{action.dest}"
    if action.help != argparse.SUPPRESS and not (complement and (note or action.help is None)):
        option["help"] = " ".join(filter(None, [action.help, note]))
    if action.nargs == 0:
        return option | {"flag": True}
    kind = getattr(action.type, "__name__", "")
    option["kind"] = TRUE_OR_FALSE if kind == "string_to_bool" else _KINDS.get(action.type, "TEXT")
    for name, value in (("nargs", action.nargs), ("metavar", action.metavar)):
        if value is not None:
            option[name] = value
    if action.choices is not None:
        option["choices"] = [str(choice) for choice in action.choices]
    if action.required and action.option_strings:
        option["required"] = True
    return option


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
