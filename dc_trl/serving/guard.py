"""Commands that end with this process, however it ends, and folders that the next one removes if it is killed."""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..files import locked_folder


_WATCHDOG = Path(__file__).with_name("watchdog.py")


def start_watchdog(*arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start `watchdog.py` for this process; `options` are those of `subprocess.Popen`."""
    return subprocess.Popen(
        [sys.executable, str(_WATCHDOG), *arguments],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must only reach this process
        **options,
    )


def end_watchdog(watchdog: "subprocess.Popen[bytes]") -> None:
    """Make a watchdog do its work now, and wait until it is done."""
    # Closing the pipe is not enough, since a forked process of this one may hold it open.
    watchdog.communicate(b"end")


@contextmanager
def temporary_folder(kind: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Yield a locked folder that only this user can read, by default in the directory for temporary files.

    Args:
        kind: purpose of the folder, as a part of its name.
        parent: directory in which the folder is created.
    """
    name = f"dc_trl-{kind}-"
    with locked_folder(Path(parent or tempfile.gettempdir(), name + uuid.uuid4().hex), f"{name}*", 0o700) as folder:
        yield folder
