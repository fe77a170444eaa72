"""The parser of a sub-command, made from its description, so that help and refusals need no torch.

The parsers in the commands' modules are the truth: `describe.py` describes them, `dc_trl.settings.generated` keeps the
descriptions.
"""

import argparse
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import read_yaml
from ..settings.command_line import OptionParser, refused_in_one_line
from ..settings.paths import (
    NEWEST_CHECKPOINT,
    NEWEST_OR_NONE,
    NO_CHECKPOINT,
    config_file,
    is_data_file,
    require_data_file,
    require_model_path,
    require_path,
    shipped,
)
from ..settings.values import TRUTH_VALUES, type_of, values_of


_MANY = 6  # choices that are listed in the help's text and not in the option's first line
# Options that name something that has to be there, and what it is.
_PATHS = {
    "model": require_model_path,
    "model_name_or_path": require_model_path,
    "run": require_path,
}


def require_options(name: str, words: Sequence[str], description: Mapping[str, Any]) -> None:
    """Show the help of a sub-command, or refuse what is wrong with its command line; both end the program."""
    parser = parser_of(name, description)
    if name == "train":
        listed = {string for action in parser._actions for string in action.option_strings}
        words = [_as_listed(word, listed) for word in words]
    args = parser.parse_args(words)
    with refused_in_one_line():
        given = {key: value for key, value in vars(args).items() if value is not None}
        if name == "train":
            given = _settings(given, description["types"])
        _require_paths(name, given)


def parser_of(name: str, described: Mapping[str, Any]) -> OptionParser:
    """Return a parser with the options of a description. Options that are not given are None."""
    parser = OptionParser(described["description"], name)
    if name == "train":
        parser.usage = f"{parser.prog} --config NAME_OR_FILE [--field value ...]"
    for title, options in described["groups"].items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    return parser


def _add(group: argparse._ActionsContainer, described: Mapping[str, Any]) -> None:
    names, help_, kind = described["names"], described.get("help"), described.get("kind")
    options: dict[str, Any] = {"help": argparse.SUPPRESS if help_ is None else help_, "default": None}
    if names[0].startswith("-"):
        options |= {"dest": described["dest"], "required": described.get("required", False)}
    if described.get("flag"):
        group.add_argument(*names, action="store_true", **options)
        return
    choices = described.get("choices")
    options |= {"nargs": described.get("nargs"), "type": _TYPES.get(kind, str)}
    if choices is not None:
        options["choices"] = choices
        if len(choices) > _MANY:
            options |= {"metavar": "NAME", "help": f"{options['help']} One of: {', '.join(choices)}."}
    else:
        options["metavar"] = described.get("metavar", kind if names[0].startswith("-") else None)
    group.add_argument(*names, **options)


def _truth(word: str) -> str:
    if word.lower() not in TRUTH_VALUES:
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word


# Reads a value, by what the help calls it.
TRUE_OR_FALSE = "true|false"
_TYPES: dict[Any, Callable[[str], Any]] = {"N": int, "X": float, TRUE_OR_FALSE: _truth}


def _as_listed(word: str, listed: Container[str]) -> str:
    """Return an option of training as it is listed: transformers takes `--some-field` for `--some_field` too."""
    name, equals, value = word.partition("=")
    other = f"--{name[2:].replace('-', '_')}"
    return f"{other}{equals}{value}" if name.startswith("--") and name not in listed and other in listed else word


def _settings(given: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Return what the configuration file says, whose fields have these types, and the command line on top of it."""
    settings: dict[str, Any] = {}
    if "config" in given:
        file = config_file(given["config"])
        settings = read_yaml(file)
        settings.pop("env", None)  # TRL sets variables of the environment from it
        settings = values_of(settings, {name: type_of(line) for name, line in types.items()}, file)
    return settings | {name: value for name, value in given.items() if name != "config"}


def _require_paths(name: str, given: Mapping[str, Any]) -> None:
    for option, require in _PATHS.items():
        value = given.get(option)
        if isinstance(value, str):
            value = shipped(value)
            # The model of a plan may be a config.json too.
            require_path(value, option) if name == "plan" and Path(value).is_file() else require(value, option)
    if isinstance(data := given.get("dataset_name"), str) and is_data_file(data):
        require_data_file(data)
    for run in given.get("compare", ()):
        require_path(run, "compare")
    for word in given.get("eval_benchmarks", ()):
        if file := word.partition("=")[2]:
            require_data_file(file, "eval_benchmarks")
    checkpoint = given.get("resume_from_checkpoint")
    if isinstance(checkpoint, str) and checkpoint.lower() not in (NEWEST_CHECKPOINT, NEWEST_OR_NONE, NO_CHECKPOINT):
        require_path(checkpoint, "resume_from_checkpoint")
    if "file" in given:
        require_path(given["file"], "file")
    if isinstance(value := given.get("config"), str):
        config_file(value)
