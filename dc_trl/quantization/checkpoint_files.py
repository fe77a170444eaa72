"""The safetensors files of a checkpoint: written as their tensors come, named at the end, kept for the next one."""

import errno
import json
import os
import re
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..files import write_text


class WrittenFile(NamedTuple):
    """A file, the names of its tensors and their size in bytes."""

    path: Path
    tensors: list[str]
    size: int


class ShardWriter:
    """Writes tensors into files of at most `max_bytes` each, or of one tensor. The tensors of one file are held.

    Args:
        stem: beginning of the paths of the files.
        max_bytes: size of the tensors at which a new file is begun.
    """

    def __init__(self, stem: Path, max_bytes: int):
        self._stem = stem
        self._max_bytes = max_bytes
        self._files: list[WrittenFile] = []
        self._held: dict[str, Tensor] = {}
        self._size = 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor on the CPU, contiguous, that does not change any more.

        Raises:
            OSError: the file system refused to write.
        """
        if self._size + value.nbytes > self._max_bytes:
            self._write()
        self._held[name] = value
        self._size += value.nbytes

    def close(self) -> list[WrittenFile]:
        """Write what is held, and return all files; raise OSError if the file system refuses."""
        self._write()
        return self._files

    def _write(self) -> None:
        if not self._held:
            return
        path = self._stem.with_name(f"{self._stem.name}-{len(self._files)}")
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        self._files.append(WrittenFile(path, list(self._held), self._size))
        self._held, self._size = {}, 0


def name_files(directory: Path, files: Sequence[WrittenFile]) -> list[WrittenFile]:
    """Give the files of a checkpoint the names that engines expect, and write their index if there are several."""
    count = len(files)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    named = []
    for file, name in zip(files, [SAFE_WEIGHTS_NAME] if count == 1 else names, strict=True):
        named.append(file._replace(path=file.path.rename(directory / name)))
    if count > 1:
        index = {
            "metadata": {"total_size": sum(file.size for file in files)},
            "weight_map": {part: file.path.name for file in named for part in file.tensors},
        }
        write_text(directory / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return named


class KeptFiles(NamedTuple):
    """Files of frozen weights, which stay under a second name when their checkpoint is removed.

    They are never written to again, so a reader of an older checkpoint is safe.

    Args:
        store: directory of the second names, on the same file system.
        stamps: for each weight a stamp that changes with its values.
        files: the files in the store.
    """

    store: Path
    stamps: Mapping[str, Hashable]
    files: list[WrittenFile]

    @classmethod
    def keep(cls, store: Path, stamps: Mapping[str, Hashable], files: list[WrittenFile]) -> Self | None:
        """Keep files in place of those that are in the store; return None where there are no hard links."""
        if store.is_dir():
            shutil.rmtree(store)
        if files:
            store.mkdir()
        try:
            for file in files:
                os.link(file.path, store / file.path.name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV):
                raise
            return None
        return cls(store, stamps, [file._replace(path=store / file.path.name) for file in files])

    def hold(self, store: Path | None, stamps: Mapping[str, Hashable]) -> bool:
        """Return whether these are the files of weights with such stamps."""
        return (self.store, self.stamps) == (store, stamps)

    def bring(self, directory: Path) -> list[WrittenFile]:
        """Link the files into a directory, and return them there."""
        for file in self.files:
            os.link(file.path, directory / file.path.name)
        return [file._replace(path=directory / file.path.name) for file in self.files]
