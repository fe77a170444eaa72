"""Assign the tensors of a checkpoint to files, and keep files that the next checkpoint has too."""

import errno
import json
import os
import shutil
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .tensor_file import Spec


class PlannedFile(NamedTuple):
    """A file with its tensors, of which either all are frozen or none."""

    name: str
    tensors: dict[str, Spec]
    frozen: bool


def plan_files(
    stored: Mapping[str, Mapping[str, Spec]], frozen: Container[str], max_bytes: int
) -> tuple[list[PlannedFile], dict[str, str]]:
    """Return files of at most `max_bytes`, or of one tensor; frozen weights have files of their own, which come last.

    The helpers of huggingface_hub and transformers plan their files from a whole state dict, and so do not fit here.

    Args:
        stored: for each weight, in order, the tensors that represent it in the checkpoint.
        frozen: names of the weights that have files of their own.
        max_bytes: size of the tensors at which a new file is begun.

    Returns:
        The files, and the text of the index by its file name; without an index where there is one file.
    """
    contents: list[tuple[dict[str, Spec], bool]] = []
    for is_frozen in (False, True):
        tensors_of_group = {
            part: spec for name in stored if (name in frozen) == is_frozen for part, spec in stored[name].items()
        }
        contents += ((tensors, is_frozen) for tensors in _shards(tensors_of_group, max_bytes))
    if len(contents) == 1:
        return [PlannedFile(SAFE_WEIGHTS_NAME, *contents[0])], {}
    files = [
        PlannedFile(f"model-{number:05d}-of-{len(contents):05d}.safetensors", *content)
        for number, content in enumerate(contents, start=1)
    ]
    total = sum(spec.size for tensors, _ in contents for spec in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {part: file.name for file in files for part in file.tensors},
    }
    return files, {SAFE_WEIGHTS_INDEX_NAME: json.dumps(index, indent=2, sort_keys=True) + "\n"}


def _shards(tensors: Mapping[str, Spec], max_bytes: int) -> Iterable[dict[str, Spec]]:
    shard: dict[str, Spec] = {}
    size = 0
    for name, spec in tensors.items():
        if shard and size + spec.size > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = spec
        size += spec.size
    if shard:
        yield shard


class KeptFiles:
    """Files of a checkpoint that stay under a second name when the checkpoint is removed.

    They are never written to again, so a reader of an older checkpoint is safe.

    Args:
        store: directory of the second names, on the same file system.
        names: names of the files.
    """

    def __init__(self, store: Path, names: list[str]):
        self._store = store
        self._names = names

    def keep(self, directory: Path) -> bool:
        """Keep the files of a directory in place of earlier ones; return False where there are no hard links."""
        if self._store.is_dir():
            shutil.rmtree(self._store)
        if self._names:
            self._store.mkdir()
        return all(_link(directory / name, self._store / name) for name in self._names)

    def bring(self, directory: Path) -> int:
        """Link the kept files into a directory, and return their size in bytes."""
        for name in self._names:
            os.link(self._store / name, directory / name)
        return sum((directory / name).stat().st_size for name in self._names)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV):
            raise
        return False
    return True
