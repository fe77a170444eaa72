"""What the sub-commands share: options, refusals in one line before anything starts, and signals that end them."""

import argparse
import difflib
import json
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from threading import Timer
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from ..secrets import printable
from .paths import shipped


def json_object(text: str) -> dict[str, Any]:
    """Return the object that a text is in JSON; a `ValueError` if it is none."""
    if not isinstance(found := json.loads(text), dict):
        raise ValueError(text)
    return found


# What stands for the value of an option in a help, by what reads the value; "TEXT" for all else.
METAVARS: dict[Any, str] = {bool: "BOOL", int: "INT", float: "FLOAT", Path: "PATH", json_object: "JSON"}


_INDENT = 24  # columns in front of what a field means

# What begins with a minus sign and is no option: a negative number, of which argparse knows no `-1e-4`.
NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf$|nan$)")

# Exceptions that mean wrong input.
WRONG_INPUT: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:  # argparse's is the option's name
        return METAVARS.get(action.type, "TEXT")


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, of a sub-command or a script, with refusals of one line: `error: `, the option, its value.

    Options cannot be abbreviated: the meaning of `--max` would change with the next option that begins like it.
    """

    def __init__(self, description: str | None, name: str | None = None) -> None:
        super().__init__(
            prog=f"dc-trl {name}" if name else None,
            description=description or "",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2; argparse would print the usage first."""
        self.exit(2, f"error: {message}; {self.prog} --help lists the options.\n")


def unknown_field(name: str, known: Iterable[str]) -> str:
    """Return the refusal of a field that the configuration does not have."""
    return f"{name} is not a field of the configuration: {nearest(name, known, 'see dc-trl train --help.')}"


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return which of the known names may have been meant; `otherwise` if none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def add_model(group: argparse._ActionsContainer, what: str, required: bool = True) -> None:
    """Add the options for a model: `--model` and `--revision`."""
    group.add_argument("--model", required=required, type=shipped, help=f"Hub id or directory {what}")
    group.add_argument("--revision", default="main", help="revision of a Hub model")


def add_template(group: argparse._ActionsContainer) -> None:
    """Add the option for variables of the chat template: `--chat_template_kwargs`."""
    group.add_argument(
        "--chat_template_kwargs", type=json_object, default={}, help="as '{\"enable_thinking\": false}'"
    )


def add_serve_options(group: argparse._ActionsContainer) -> None:
    """Add the option that takes the rest of the line: `--serve_options`."""
    group.add_argument("--serve_options", nargs=argparse.REMAINDER, default=[], help="last: options of `vllm serve`")


def add_fields(group: argparse._ActionsContainer, settings: type, *names: str) -> None:
    """Add options for fields of a dataclass that are text, choices or numbers, with the fields' defaults and help."""
    hints = get_type_hints(settings)
    for field in fields(settings):
        if field.name in names:
            kind, choices = kind_and_choices(hints[field.name])
            meaning = field.metadata["help"]
            group.add_argument(f"--{field.name}", type=kind, choices=choices, default=field.default, help=meaning)


def kind_and_choices(hint: Any) -> tuple[type, tuple | None]:
    """Return the type of one word of a field's value, and all that it may be; `hint` is as of `get_type_hints`."""
    parts = (hint, *get_args(hint))
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), None)
    return next((kind for kind in (bool, int, float) if kind in parts), str), choices


def described(
    name: str, kind: Any, meaning: str, width: int | None = None, choices: Any = None, default: Any = None
) -> str:
    """Return what an option means: in full, or by its first sentence for a terminal of this width."""
    meaning = " ".join(meaning.replace("%%", "%").split())
    told = ", ".join(map(str, choices or ()))
    if width is not None:  # the first sentence without what is in parentheses
        told = textwrap.shorten(told, 60, placeholder=" …")
        meaning = re.split(r"(?<!e\.g)(?<!i\.e)[.:;] ", re.sub(r" \([^()]*\)", "", meaning))[0].rstrip(".")
    facts = f" {{{told}}}" if told else ""
    if default not in (None, []):
        facts += f" [{', '.join(default) if isinstance(default, list) else default}]"
    room = width or max(shutil.get_terminal_size((120, 24)).columns, 80)
    value = "" if told else METAVARS.get(kind, "TEXT")
    line = f"{f'  --{name} {value}':<{_INDENT - 2}}  {meaning}{facts}"
    return textwrap.fill(line, room, subsequent_indent=" " * _INDENT)


@contextmanager
def refused_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """End the program with `error: ` and the message of an exception of `WRONG_INPUT` or of the others."""
    try:
        yield
    except (*WRONG_INPUT, *others) as error:
        sys.exit(printable(f"error: {error}"))


def leave_on_sigterm() -> None:
    """Let SIGTERM end the program as Ctrl-C does, through the blocks that end what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def saying_if_slow(line: str) -> Iterator[None]:
    """Print a line if the block has not ended after ten seconds."""
    timer = Timer(10.0, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(line: str) -> None:
    """Print a line at once, also where the output goes to a file, and without the escape sequences of others."""
    print(printable(line), flush=True)
