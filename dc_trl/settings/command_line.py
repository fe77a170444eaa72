"""How the scripts say what is wrong with their options: one line, before anything starts."""

import argparse
from typing import NoReturn


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, whose refusals are one line like all others: `error: `, the option, its value."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2; argparse would print the usage first."""
        self.exit(2, f"error: {message}; --help lists the options.\n")
