"""Files that another process may read or somebody may have changed, and folders that another may be writing to."""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


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
    """Removes a folder that a killed process left behind; one that a living process has locked stays."""
    try:
        descriptor = lock_folder(folder)
    except (BlockingIOError, FileNotFoundError):
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
