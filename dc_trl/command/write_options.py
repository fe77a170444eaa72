"""Writes `options.json`, from which help and refusals come, from the parsers of all commands:

    python -m dc_trl.command.write_options

Run it when an option or a field has come, gone or changed.
"""

import argparse
import json
from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

from ..files import write_text
from ..settings.values import written
from ..training.arguments import ARGUMENTS
from . import COMMANDS
from .options import FILE, TRUE_OR_FALSE


_MADE_WITH = ("trl", "transformers")
_KINDS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
# TRL's parser takes it out of the command line.
_CONFIG = {
    "names": ["--config"],
    "dest": "config",
    "help": "YAML file of the fields below, or the name of a configuration that ships",
    "kind": "NAME_OR_FILE",
}


def described(parser: argparse.ArgumentParser, description: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """What the file holds of a parser.

    Args:
        parser: of a sub-command.
        description: of it, with `dc-trl NAME` for the commands.
        fields: group of each field of a dataclass; empty where the parser's own groups count.
    """
    groups: dict[str, list[dict[str, Any]]] = {title: [] for title in fields.values()}
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.dest == "help":
                continue
            title = fields.get(action.dest) or group.title or "options"
            groups.setdefault(title, []).append(_option(action, bool(fields)))
    return {"description": description, "groups": {title: options for title, options in groups.items() if options}}


def _option(action: argparse.Action, with_default: bool) -> dict[str, Any]:
    names = [name for name in action.option_strings if "-" not in name[2:]]  # transformers adds --some-field
    option: dict[str, Any] = {"names": names or [action.dest], "dest": action.dest}
    flag = action.nargs == 0
    complement = names and names[0].startswith("--no_") and names[0] != f"--{action.dest}"
    if action.help not in (None, argparse.SUPPRESS) and not (with_default and complement):
        option["help"] = f"{action.help}{_default(action) if with_default else ''}"
    elif action.help is None and not complement:
        option["help"] = _default(action).strip()
    if flag:
        return option | {"flag": True} | ({"required": True} if action.required else {})
    kind = getattr(action.type, "__name__", "")
    option["kind"] = TRUE_OR_FALSE if kind == "string_to_bool" else _KINDS.get(action.type, "TEXT")
    for name in ("nargs", "metavar"):
        if (value := getattr(action, name)) is not None:
            option[name] = value
    if action.choices is not None:
        option["choices"] = [str(choice) for choice in action.choices]
    if action.required and action.option_strings:
        option["required"] = True
    return option


def _default(action: argparse.Action) -> str:
    value = action.default.value if isinstance(action.default, Enum) else action.default
    if value is None or value in ([], "", argparse.SUPPRESS):
        return ""
    return f" (default: {str(value).replace('%', '%%')})"


def file_text() -> str:
    """The file as it has to be, from the parsers of all commands. Imports everything."""
    commands = {}
    for name, (module_name, _) in COMMANDS.items():
        module = import_module(f".{module_name}", __package__)
        fields = module.field_groups() if name == "train" else {}
        commands[name] = described(module.make_parser(), module.__doc__ or "", fields)
    commands["train"]["groups"] = {"the configuration": [_CONFIG], **commands["train"]["groups"]}
    listed = {option["dest"] for options in commands["train"]["groups"].values() for option in options}
    types = {name: kind for part in ARGUMENTS for name, kind in get_type_hints(part).items() if name in listed}
    commands["train"]["types"] = {name: written(kind) for name, kind in types.items()}
    table = {"made with": {library: version(library) for library in _MADE_WITH}, "commands": commands}
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write_text(FILE, file_text())
