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
from ..settings.values import values_of


def _require_model(word: str, option: str) -> None:
    require_model_path(shipped(word), option)


def _require_data(word: str, option: str) -> None:
    if is_data_file(word):
        require_data_file(word, option)


def _require_benchmark(word: str, option: str) -> None:
    if file := word.partition("=")[2]:
        require_data_file(file, option)


def _require_checkpoint(word: str, option: str) -> None:
    if word.lower() not in (NEWEST_CHECKPOINT, NEWEST_OR_NONE, NO_CHECKPOINT):
        require_path(word, option)


# What the values of options have to name, which is refused before torch is loaded.
_PATHS: dict[str, Callable[[str, str], Any]] = {
    "model": _require_model,
    "model_name_or_path": _require_model,
    "sampler_model": _require_model,
    "run": require_path,
    "compare": require_path,
    "file": require_path,
    "dataset_name": _require_data,
    "eval_benchmarks": _require_benchmark,
    "resume_from_checkpoint": _require_checkpoint,
    "config": lambda word, _: config_file(word),
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
        for names, option in options:
            group.add_argument(*names, **{"help": argparse.SUPPRESS} | option)
    return parser


def _as_listed(word: str, listed: Container[str]) -> str:
    """Return an option of training as it is listed: transformers takes `--some-field` for `--some_field` too."""
    name, equals, value = word.partition("=")
    other = f"--{name[2:].replace('-', '_')}"
    return f"{other}{equals}{value}" if name.startswith("--") and name not in listed and other in listed else word


def _settings(given: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the configuration file says, whose fields have these types, and the command line on top of it."""
    settings: dict[str, Any] = {}
    if "config" in given:
        file = config_file(given["config"])
        settings = read_yaml(file)
        settings.pop("env", None)  # TRL sets variables of the environment from it
        settings = values_of(settings, types, file)
    return settings | {name: value for name, value in given.items() if name != "config"}


def _require_paths(name: str, given: Mapping[str, Any]) -> None:
    """Refuse a file or a directory that is not there, by the name of its option."""
    for option, require in _PATHS.items():
        value = given.get(option)
        for word in value if isinstance(value, list) else [value]:
            of_a_plan = name == "plan" and option == "model" and Path(shipped(str(word))).is_file()  # a config.json
            if isinstance(word, str) and not of_a_plan:
                require(word, option)
