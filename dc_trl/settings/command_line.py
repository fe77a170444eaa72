"""What the scripts share: options, one line for what is wrong with them before anything starts, and the way out."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, whose refusals are one line like all others: `error: `, the option, its value."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2; argparse would print the usage first."""
        self.exit(2, f"error: {message}; --help lists the options.\n")


def add_model(group: argparse._ActionsContainer, what: str, required: bool = True) -> None:
    """Options for a model: `--model` and `--revision`."""
    group.add_argument("--model", required=required, help=f"Hub id or directory {what}")
    group.add_argument("--revision", default="main", help="revision of a Hub model")


def add_serve_options(group: argparse._ActionsContainer) -> None:
    """An option that takes the rest of the line: `--serve_options`."""
    group.add_argument("--serve_options", nargs=argparse.REMAINDER, default=[], help="last: options of `vllm serve`")


def add_fields(group: argparse._ActionsContainer, settings: type, *names: str) -> None:
    """Options for fields of a dataclass that are text, one of a `Literal`'s words, or numbers.

    They have the fields' defaults and help.
    """
    hints = get_type_hints(settings)
    for field in fields(settings):
        if field.name in names:
            hint, help_ = hints[field.name], field.metadata["help"]
            of = get_args(hint) or (hint,)
            kind: Any = int if int in of else float if float in of else str
            choices = of if get_origin(hint) is Literal else None
            group.add_argument(f"--{field.name}", type=kind, choices=choices, default=field.default, help=help_)


@contextmanager
def refused_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """Ends the program with `error: ` and the message, where the input is wrong and not the program.

    Args:
        *others: exceptions that mean this too, beside ValueError, OSError and ImportError.
    """
    wrong_input: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, *others)
    try:
        yield
    except wrong_input as error:
        sys.exit(f"error: {error}")


def leave_on_sigterm() -> None:
    """Has SIGTERM end the program as Ctrl-C does: through the blocks that end what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def leave_while_loading() -> None:
    """Has Ctrl-C and SIGTERM end the program with one line and 128 + the signal's number, while it still imports.

    What is called next sets handlers of its own. A signal that is ignored, as in the background, stays so.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        os.write(2, f"\n{signal.Signals(signum).name}: nothing had begun, the same command begins again.\n".encode())
        sys.exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, leave)


def say(line: str) -> None:
    """Prints a line at once, also where the output goes to a file."""
    print(line, flush=True)
