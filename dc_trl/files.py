"""Reads and writes files whole, locks folders against other processes, and removes what killed ones left behind."""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


LOCK_FILE = ".dc_trl.lock"  # in an output directory, while a run writes there

# Output directories that this process has locked, by their resolved paths.
_locked: dict[Path, int] = {}

logger = logging.getLogger(__name__)


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def read_text(path: Path) -> str:
    """Reads a file in UTF-8.

    Raises:
        ValueError: it is no text in UTF-8; the message names it.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error.reason}): repair or remove the file.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        ValueError: it holds something else; the message names it.
        OSError: it cannot be read.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove the file.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: repair or remove the file.")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping.

    Raises:
        ValueError: it holds something else, or is no YAML; the message names the file.
        OSError: it cannot be read.
    """
    text = read_text(path)
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} holds {str(content)[:80]!r}: write a mapping of names to values.")
    return content


def line_of(path: Path, name: str) -> int:
    """The line on which a YAML file that `read_yaml` has read sets a name, from 1; its first line where none does."""
    root = yaml.compose(read_text(path), _Loader)
    return next((key.start_mark.line + 1 for key, _ in root.value if key.value == name), 1)


class _Loader(yaml.SafeLoader):
    """A key that stands twice would silently lose what stands there first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1 and name != "<<":
                raise ValueError(f"{name!r} stands there twice (line {node.start_mark.line + 1} ff.): remove one.")
        return mapping


def parse_object(option: str, value: Any) -> Mapping[str, Any]:
    """The JSON object that an option holds, as text or read already.

    Raises:
        ValueError: it is something else; the message names the option and its value.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{option}={value!r} is not JSON ({error}): write '{{\"name\": value}}'.") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{option}={value!r} is no JSON object: write '{{\"name\": value}}'.")
    return found


def make_folder(option: str, folder: Path) -> None:
    """Makes a folder that an option names, and those above it, where they are missing.

    Raises:
        ValueError: it cannot be; the message names the option.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{option}={str(folder)!r} cannot be a directory ({error.strerror}): choose another one."
        ) from error


def set_aside(files: Iterable[Path]) -> dict[Path, Path]:
    """Renames files and folders to NAME.1.SUFFIX and so on, all with the first number that none of them has used.

    Returns:
        The new path of each that was there, by its old one.
    """
    kept, number = list(files), 1
    while any(file.with_suffix(f".{number}{file.suffix}").exists() for file in kept):
        number += 1
    return {file: file.rename(file.with_suffix(f".{number}{file.suffix}")) for file in kept if file.exists()}


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
    """Removes a folder that a killed process left; one that a living process has locked, or another user's, stays."""
    try:
        descriptor = lock_folder(folder)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError, PermissionError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


@contextmanager
def lock_output(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps other runs out of an output directory for the time of the block, or until this process ends or is killed.

    The directory is made if it is not there. The process that has locked it may do so again. Processes that this one
    starts or forks do not hold the lock: it must not outlive the run. On a network file system with `flock` (NFS has
    it) it holds on all machines; where there is none, a warning says so.

    Raises:
        ValueError: another process writes there, or nobody can; the message names the directory and what to do.
    """
    folder = Path(output_dir).resolve()
    if folder in _locked:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _locked[folder] = _lock(folder / LOCK_FILE)
    except BlockingIOError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} is in use by another run, {error}: let it end, stop it, or choose "
            "another output_dir."
        ) from None
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written ({error.strerror}): choose another one."
        ) from error
    try:
        yield
    finally:
        if (descriptor := _locked.pop(folder, None)) is not None:  # None in a fork
            (folder / LOCK_FILE).unlink(missing_ok=True)
            os.close(descriptor)


def _lock(path: Path) -> int:
    """Descriptor of a locked file, which says who holds it; a BlockingIOError names another process that does."""
    while True:
        # A file and not the folder: over NFS only what is open for writing is locked on other machines too.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1024).decode(errors="replace")
            os.close(descriptor)
            raise BlockingIOError(holder or "which is just starting") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                os.close(descriptor)
                raise
            logger.warning(f"{path.parent} cannot be locked ({error.strerror}): start no second run in it.")
        if os.fstat(descriptor).st_nlink > 0:
            break
        os.close(descriptor)  # a run that ended just now has removed the file
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError:
        path.unlink()
        os.close(descriptor)
        raise
    return descriptor


def _leave_locks_to_parent() -> None:
    """In a forked child: a copy of the descriptor would hold the lock for as long as the child lives."""
    for descriptor in _locked.values():
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


@contextmanager
def locked_folder(folder: Path, others: str, mode: int = 0o777) -> Iterator[Path]:
    """A new folder for the time of the block, locked, with these permissions less those of the umask.

    What killed processes left beside it, under names that the pattern `others` fits, is removed first.
    """
    for abandoned in folder.parent.glob(others):
        remove_if_abandoned(abandoned)
    # Takes its name once it is locked, lest another process that starts now takes it for abandoned.
    unlocked = folder.with_name(f".{folder.name}")
    unlocked.mkdir(mode)
    lock = lock_folder(unlocked)
    unlocked.rename(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
