"""Files that another process may read, and folders that it may be writing to."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def set_aside(files: list[Path]) -> list[Path]:
    """Renames files to NAME.1.SUFFIX and so on, all with the first number that none of them has used."""
    number = 1
    while any(file.with_suffix(f".{number}{file.suffix}").exists() for file in files):
        number += 1
    return [file.rename(file.with_suffix(f".{number}{file.suffix}")) for file in files]


def lock_folder(folder: Path) -> int:
    """Marks a folder as in use for as long as this process keeps the descriptor open, or lives.

    Raises:
        BlockingIOError: another process uses it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def remove_if_abandoned(folder: Path) -> None:
    """Removes a folder that a killed process left behind; one that a living process has locked, or of another user,
    stays."""
    try:
        descriptor = lock_folder(folder)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError, PermissionError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder in the directory for temporary files, gone after the block.

    What killed processes left there under the same prefix is removed first.
    """
    root = Path(tempfile.gettempdir())
    for abandoned in root.glob(f"{prefix}*"):
        remove_if_abandoned(abandoned)
    # Takes its name once it is locked, lest another process that starts now takes it for abandoned.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    lock = lock_folder(unlocked)
    folder = unlocked.rename(root / unlocked.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
