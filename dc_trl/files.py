"""Write files completely or not at all, read them, lock folders, and remove what killed processes left behind.

Nothing here writes through a symbolic link: a new file replaces a link of its name, and a file that is written in
place must not be one. The folders above it may be links, as a user's output directory often is.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import yaml


LOCK_FILE = ".dc_trl.lock"  # exists in an output directory while a run writes there

_locked: set[Path] = set()  # output directories that this process has locked

logger = logging.getLogger(__name__)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, completely or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, durable: bool = False) -> None:
    """Write a file completely or not at all, `durable` until it is on the disk; a link of its name is replaced."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with _path_in_errors(path):
        unfinished.unlink(missing_ok=True)  # left by a killed process, or a link
        try:
            with open(unfinished, "xb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        if durable:
            sync_to_disk(path.parent)


def write_json(path: Path, value: Any, durable: bool = False) -> None:
    """Write a value as JSON, completely or not at all; see `write_bytes`."""
    write_bytes(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode(), durable)


def append_json(path: Path, value: Any) -> None:
    """Append a value as a line of JSON to a file, which may not be a link; create the file if there is none."""
    with open_in_place(path, os.O_WRONLY | os.O_APPEND) as file, _path_in_errors(path):
        file.write(f"{json.dumps(value)}\n".encode())


def open_in_place(path: Path, flags: int) -> BinaryIO:
    """Open a file, which may not be a link, for unbuffered writing in place; create it if there is none."""
    with _path_in_errors(path):
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    return open(descriptor, "rb+" if flags & os.O_RDWR else "wb", buffering=0)


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Make an `OSError` name this path, which writing to a descriptor leaves out."""
    try:
        yield
    except OSError as error:
        link = "It is a link, through which nothing is written: remove it"
        raise OSError(error.errno, link if error.errno == errno.ELOOP else error.strerror, str(path)) from error


def sync_to_disk(path: Path) -> None:
    """Return once a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems support it only for files
            raise
    finally:
        os.close(descriptor)


def replace_folder_link(folder: Path) -> None:
    """Remove a symbolic link in the place where a folder is about to be created or moved."""
    if folder.is_symlink():
        folder.unlink()


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """Yield a new folder within `folder`; move its files into `folder` when the block ends without an error.

    This is for writers of other libraries, which write through links: a moved file replaces a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder / f".files-{uuid.uuid4().hex}.partial", ".files-*.partial", mode=0o700) as partial:
        yield partial
        for file in sorted(partial.rglob("*")):
            target = folder / file.relative_to(partial)
            if file.is_dir():
                replace_folder_link(target)
                target.mkdir(exist_ok=True)
            else:
                os.replace(file, target)


def read_text(path: Path) -> str:
    """Read a file in UTF-8; a `ValueError` names one that is not."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 ({error.reason}): repair or remove the file.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; a `ValueError` names one that does not."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): repair or remove the file.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object: repair or remove the file.")
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; a `ValueError` names one that does not."""
    text = read_text(path)
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} holds {str(content)[:80]!r}: write lines of the form 'name: value'.")
    return content


class _Loader(yaml.SafeLoader):
    """A safe loader that reads `off`, `no` and dates as words, and refuses keys that stand there twice."""

    yaml_implicit_resolvers: ClassVar = {
        first: [rule for rule in rules if rule[0].rpartition(":")[2] not in ("bool", "timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1 and name != "<<":
                raise ValueError(f"{name!r} is set twice (from line {node.start_mark.line + 1} on): remove one.")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?:true|false)$", re.IGNORECASE), list("tTfF"))


def set_aside(files: Iterable[Path]) -> dict[Path, Path]:
    """Rename files and folders to NAME.1.SUFFIX and so on, all with the first number that is free for all.

    Returns:
        The new path of each existing file, by its old path.
    """
    kept, number = list(files), 1
    while any(os.path.lexists(file.with_suffix(f".{number}{file.suffix}")) for file in kept):
        number += 1
    return {file: file.rename(file.with_suffix(f".{number}{file.suffix}")) for file in kept if os.path.lexists(file)}


def lock_folder(folder: Path) -> int:
    """Mark a folder as in use until this process closes the descriptor or ends; `BlockingIOError` if another does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked_folder(folder: Path, others: str, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new, locked folder that exists during the block; its permissions are `mode` less the umask.

    First remove folders that killed processes left beside it under names that match the pattern `others`.
    """
    for abandoned in folder.parent.glob(others):
        try:
            lock = lock_folder(abandoned)
        except OSError:  # a living process has locked it, or it is another user's
            continue
        shutil.rmtree(abandoned, ignore_errors=True)
        os.close(lock)
    folder.mkdir(mode)
    lock = lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def lock_output(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other runs out of an output directory during the block, or until this process ends or is killed.

    The directory is created if it is missing. The process that holds the lock may take it again. Processes that this
    one starts or forks do not hold it, because it must not outlive the run.
    """
    folder = Path(output_dir).resolve()
    if folder in _locked:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_in_place(folder / LOCK_FILE, os.O_RDWR)
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written ({error.strerror}): choose another one."
        ) from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = file.read(1024).decode(errors="replace")
            raise ValueError(
                f"output_dir={str(output_dir)!r} is in use by another run, {holder}: let it end, stop it, or choose "
                "another output_dir."
            ) from None
        except OSError as error:
            logger.warning(f"{output_dir} cannot be locked ({error.strerror}): start no second run in it.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        _locked.add(folder)
        try:
            yield
        finally:
            _locked.discard(folder)
            (folder / LOCK_FILE).unlink(missing_ok=True)
