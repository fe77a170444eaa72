"""The folder with the checkpoints from which an engine loads new weights."""

import shutil
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from ..quantization.checkpoint import CheckpointWriter
from ..serving.errors import ServerError
from ..serving.guard import guarded_folder


def folder_path(parent: str | None, run: str) -> Path:
    """Return the directory of a run's checkpoints on this machine, in shared memory by default."""
    # Host names contain no "_".
    return Path("/dev/shm" if parent is None else parent, f"dc_trl-sync-{socket.gethostname()}_{run}")


class CheckpointFolder:
    """Folder in shared memory (or in the user's directory) with the checkpoints that the engine reads.

    It is locked while its process lives, and removed when the process ends, even if it is killed. The next run on the
    same host removes what is left after a power failure. Other hosts may write to the same directory, and do not see
    the locks of this one.
    """

    def __init__(self, parent: str | None, run: str):
        self.path = folder_path(parent, run)
        root = self.path.parent
        if not root.is_dir():
            raise ServerError(
                f"weight_sync_dir={parent!r}: {root} is no directory on this machine. Set weight_sync_dir to a "
                "directory that both the trainer and the vLLM server see."
            )
        stack = ExitStack()
        stack.enter_context(guarded_folder(self.path, others=folder_path(parent, "*").name))
        weakref.finalize(self, stack.close)

    def write(
        self, writer: CheckpointWriter, tensors: Iterator[tuple[str, Tensor]], version: str, kept: str | None
    ) -> dict[str, float]:
        """Write the next checkpoint, and return its bytes and the seconds that it took.

        All earlier ones except `kept` are removed first, because their room may be needed.
        """
        self.remove_all_but(kept)
        start = time.perf_counter()
        size = writer.write(tensors, self.path / version)
        return {"bytes_written": size, "write_seconds": time.perf_counter() - start}

    def remove_all_but(self, version: str | None) -> None:
        """Remove all checkpoints except that of a version."""
        for checkpoint in self.path.iterdir():
            if checkpoint.name != version:
                shutil.rmtree(checkpoint, ignore_errors=True)
