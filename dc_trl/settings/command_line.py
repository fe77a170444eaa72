"""What the scripts share: options, one line for what is wrong with them before anything starts, and the way out."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, whose refusals are one line like all others: `error: `, the option, its value."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2; argparse would print the usage first."""
        self.exit(2, f"error: {message}; --help lists the options.\n")


@contextmanager
def refused_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """Ends the program with `error: ` and the message, where the input is wrong and not the program.

    Args:
        *others: exceptions that mean this too, beside ValueError, OSError and ImportError.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, *others)
    try:
        yield
    except kinds as error:
        sys.exit(f"error: {error}")


def leave_on_sigterm() -> None:
    """Has SIGTERM end the program as Ctrl-C does: through the blocks that end what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
