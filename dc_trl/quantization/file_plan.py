"""Which tensor of a checkpoint goes into which file, and files that the next checkpoint has too."""

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
    """A file and the tensors in it."""

    name: str
    tensors: dict[str, Spec]
    frozen: bool  # all of them are


def plan_files(
    stored: Mapping[str, Mapping[str, Spec]], frozen: Container[str], max_bytes: int
) -> tuple[list[PlannedFile], dict[str, str]]:
    """Files of at most so many bytes, or of one tensor; frozen weights have files of their own, which come last.

    By hand because huggingface_hub's and transformers' helpers plan their files from a whole state dict.

    Args:
        stored: for each weight, in order, the tensors that stand for it.
        frozen: weights whose files are apart.
        max_bytes: size of the tensors at which a new file is begun.

    Returns:
        The files, and the text of the index by its name, where there is more than one file.
    """
    contents: list[tuple[dict[str, Spec], bool]] = []
    for apart in (False, True):
        of_group = {part: spec for name in stored if (name in frozen) == apart for part, spec in stored[name].items()}
        contents += ((tensors, apart) for tensors in _shards(of_group, max_bytes))
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
    """Files of a checkpoint that stay when it goes, under a second name.

    Nobody writes to them again, so that a reader of an older checkpoint is safe.

    Args:
        store: directory of the second names, on the same file system.
        names: of the files.
    """

    def __init__(self, store: Path, names: list[str]):
        self._store = store
        self._names = names

    def keep(self, directory: Path) -> bool:
        """Keeps the files of a directory in place of others; False where the file system has no hard links."""
        if self._store.is_dir():
            shutil.rmtree(self._store)
        if self._names:
            self._store.mkdir()
        return all(_link(directory / name, self._store / name) for name in self._names)

    def bring(self, directory: Path) -> int:
        """Gives a directory the files that were kept; returns their bytes."""
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
