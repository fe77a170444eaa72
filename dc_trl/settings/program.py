"""How the user called this program, so that messages and help name a command that exists where the user is."""

import re
import shlex
import sys
from pathlib import Path


PACKAGE = Path(__file__).resolve().parent.parent
_SCRIPTS = PACKAGE.parent / "scripts"
_NAMED = re.compile(r"\bdc-trl ([a-z][a-z-]*)")


def command_words(name: str) -> list[str]:
    """The words that start a sub-command: `python scripts/serve.py` for a user who runs the scripts of a clone,
    `python -m dc_trl serve` for one who runs the module, and `dc-trl serve` otherwise.

    Args:
        name: of the sub-command, as in `dc-trl NAME`.
    """
    started = Path(sys.argv[0])
    if _is_script(started):
        return ["python", str(started.with_name(_file_name(name)))]
    if started.name == "__main__.py" and started.resolve().parent == PACKAGE:
        return ["python", "-m", "dc_trl", name]
    return ["dc-trl", name]


def command(name: str) -> str:
    """`command_words` as one text."""
    return shlex.join(command_words(name))


def serve_line(folder: Path) -> str:
    """What to type into a shell to serve a checkpoint."""
    return f"vllm serve {shlex.quote(str(folder))}"


def launched_words(name: str) -> list[str]:
    """What comes behind `accelerate launch` and its options, to start a sub-command in several processes."""
    started = Path(sys.argv[0])
    return [str(started.with_name(_file_name(name)))] if _is_script(started) else ["-m", "dc_trl", name]


def here(text: str) -> str:
    """A text in which every `dc-trl NAME` is the command that exists where the user is."""
    return _NAMED.sub(lambda found: command(found[1]), text)


def _is_script(path: Path) -> bool:
    return path.suffix == ".py" and path.resolve().parent == _SCRIPTS


def _file_name(name: str) -> str:
    return f"{name.replace('-', '_')}.py"
