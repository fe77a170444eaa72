"""Where the checkpoints are that new weights reach an engine in."""

import shutil
import socket
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from ..quantization.checkpoint import CheckpointWriter
from ..serving.errors import ServerError
from ..serving.guard import guarded_folder


_FROZEN = ".frozen"  # files of weights that training leaves alone


def folder_path(parent: str | None, run: str) -> Path:
    """Directory of a run's checkpoints on this machine, in shared memory by default."""
    # No host has "_" in its name.
    return Path("/dev/shm" if parent is None else parent, f"dc_trl-sync-{socket.gethostname()}_{run}")


class CheckpointFolder:
    """Folder in shared memory (or where the user says) with the checkpoints that the engine reads.

    It is locked as long as its process lives and removed with it, also where that is killed; what is left where a
    machine lost its power is removed by the next one on the same host. Other hosts may write to the same directory,
    and not see the locks of this one.
    """

    def __init__(self, parent: str | None, run: str):
        self.path = folder_path(parent, run)
        root = self.path.parent
        if not root.is_dir():
            raise ServerError(
                f"weight_sync_dir={parent!r}: {root} is no directory on this machine. Set weight_sync_dir to one that "
                "the trainer and the vLLM server both see."
            )
        stack = ExitStack()
        stack.enter_context(guarded_folder(self.path, others=folder_path(parent, "*").name))
        weakref.finalize(self, stack.close)

    def write(
        self,
        writer: CheckpointWriter,
        tensors: Iterator[tuple[str, Tensor]],
        frozen: Mapping[str, Hashable],
        version: str,
        kept: str | None,
    ) -> dict[str, float]:
        """Writes the next checkpoint; returns what it cost, see `WriteCost`.

        Those before, but for the `kept` one, are obsolete: their room may be needed.
        """
        self.remove_all_but(kept)
        writer.write(tensors, self.path / version, frozen, self.path / _FROZEN)
        return writer.cost._asdict()

    def remove_all_but(self, version: str | None) -> None:
        for checkpoint in self.path.iterdir():
            if checkpoint.name not in (version, _FROZEN):
                shutil.rmtree(checkpoint, ignore_errors=True)
