"""`dc-trl`: one program with a module for each sub-command, which is imported when it is called.

A module has `make_parser()` and `main(words)`, which returns the argument of `sys.exit`.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from ..secrets import printable
from ..serving.errors import ServerError
from ..settings.command_line import WRONG_INPUT, OptionParser, leave_on_sigterm, nearest
from ..version import __version__


# Module and purpose of each sub-command.
COMMANDS = {
    "train": ("train", "train a policy with DC-GRPO"),
    "serve": ("serve", "start a vLLM server for training, in the deployment scheme"),
    "calibrate": ("calibrate", "measure engines' mismatch before a run, and propose the tolerance ε"),
    "evaluate": ("evaluate", "measure avg@k, pass@k and maj@k of a policy as it is deployed"),
    "verify": ("verify", "ask a server whether it serves a checkpoint's weights"),
    "watch": ("watch", "warn of the mismatch between a live server and any trainer's checkpoints"),
    "report": ("report", "make an HTML page of a run, with its figures"),
    "prepare-data": ("prepare_data", "clean training problems, and write them with a report"),
    "doctor": ("doctor", "say what this machine can do, and print a block for an issue"),
}


def subcommand(make_parser: Callable[[], OptionParser], *refusals: type[Exception], code: int = 1) -> Callable:
    """Make `main` of a function of a command's options: it parses words, ends on SIGTERM, and refuses in one line.

    Args:
        make_parser: returns the command's parser.
        refusals: exceptions that mean wrong input, beside `WRONG_INPUT` and those of servers.
        code: exit code of a refusal and, where 1 is an answer, of any other exception too.
    """

    wrong_input: tuple[type[Exception], ...] = (*WRONG_INPUT, ServerError, *refusals)

    def decorate(run: Callable) -> Callable:
        def main(words: Sequence[str] | None = None) -> int | None:
            args = make_parser().parse_args(words)
            leave_on_sigterm()
            try:
                return run(args)
            except wrong_input as error:
                if code == 1:
                    sys.exit(printable(f"error: {error}"))
                print(printable(f"error: {error}"), file=sys.stderr)
                return code
            except KeyboardInterrupt:
                return 130
            except Exception:
                if code == 1:
                    raise
                traceback.print_exc()
                return code

        return main

    return decorate


def call(name: str, words: Sequence[str] | None = None) -> None:
    """Run a sub-command with its options, by default those of the process; end the program where it does."""
    outcome = import_module(f".{COMMANDS[name][0]}", __name__).main(words)
    if outcome is not None:
        sys.exit(outcome)


def main(words: Sequence[str] | None = None) -> None:
    """Run the program; the first word names the sub-command."""
    given = sys.argv[1:] if words is None else list(words)
    listed = "\n".join(f"  {name:<14}{meaning}" for name, (_, meaning) in COMMANDS.items())
    parser = OptionParser(f"GRPO for models that will be served quantized.\n\ncommands:\n{listed}")
    parser.prog = "dc-trl"
    parser.usage = f"{parser.prog} [--version] COMMAND [options]"
    parser.epilog = f"{parser.prog} COMMAND --help describes a command and its options."
    parser.add_argument("--version", action="version", version=f"dc_trl {__version__}")
    if not given or given[0].startswith("-"):
        parser.parse_args(given)
        parser.error("no command is given")
    if given[0] not in COMMANDS:
        hint = nearest(given[0].replace("_", "-"), COMMANDS, f"use one of {', '.join(COMMANDS)}")
        parser.error(f"{given[0]!r} is no command: {hint}")
    call(given[0], given[1:])
