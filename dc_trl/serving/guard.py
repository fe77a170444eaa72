"""What does not outlive this process, however it ends: a watchdog's command, or a folder."""

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
    """Starts `watchdog.py` for this process; `options` are those of `subprocess.Popen`."""
    return subprocess.Popen(
        [sys.executable, str(_WATCHDOG), *arguments],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process
        **options,
    )


def end_watchdog(watchdog: "subprocess.Popen[bytes]") -> None:
    """Has it do its work now, and waits until that is done."""
    # Closing the pipe would not do: a process that this one has forked may hold it open.
    watchdog.communicate(b"end")


@contextmanager
def guarded_folder(folder: Path, others: str, mode: int = 0o777) -> Iterator[Path]:
    """See `locked_folder`; where this process is killed within the block, the folder is removed all the same."""
    with locked_folder(folder, others, mode):
        watchdog = start_watchdog("--folder", str(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield folder
        finally:
            end_watchdog(watchdog)


@contextmanager
def temporary_folder(kind: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A guarded folder for files of this user alone, in the directory for temporary files by default.

    Args:
        kind: what it is for, as a part of its name.
        parent: directory in which it is made.
    """
    name = f"dc_trl-{kind}-"
    with guarded_folder(Path(parent or tempfile.gettempdir(), name + uuid.uuid4().hex), f"{name}*", 0o700) as folder:
        yield folder
