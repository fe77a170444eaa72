"""Commands that end with this process, however it ends, and folders that the next one removes if it is killed."""

import subprocess
import sys
import tempfile
import uuid
from contextlib import AbstractContextManager
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


def temporary_folder(kind: str) -> AbstractContextManager[Path]:
    """Yield a locked folder that only this user can read, in the directory for temporary files.

    Args:
        kind: purpose of the folder, as a part of its name.
    """
    name = f"dc_trl-{kind}-"
    return locked_folder(Path(tempfile.gettempdir(), name + uuid.uuid4().hex), f"{name}*", 0o700)
