"""Safetensors files that are written while their tensors are computed, byte for byte as `safetensors` writes them."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor


# Names of the dtypes in safetensors, in the order in which it writes them.
_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = list(_NAMES)


class Spec(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class TensorFile:
    """A safetensors file of tensors whose name, dtype and shape are known; their values are appended piece by piece.

    Nothing is held in memory: a piece is written from its own memory to its place in the file. That takes half the
    time of mapping a file in shared memory and writing to the map, whose pages would be zeroed first, and a full file
    system raises an error instead of killing the process by a signal.

    Args:
        path: path of the new file, which must not exist yet.
        tensors: specification of each tensor by name.

    Raises:
        OSError: the file system refused to write.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec]):
        self.size = 0
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}  # positions of the next piece and of the tensor's end
        header = self._plan(tensors)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(memoryview(header), 0)

    def _plan(self, tensors: Mapping[str, Spec]) -> bytes:
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, spec in sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])):
            start, end = end, end + spec.size
            described[name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": (start, end)}
            self._places[name] = start, end
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        first = 8 + len(text)
        self._places = {name: (first + start, first + end) for name, (start, end) in self._places.items()}
        self.size = first + end
        return len(text).to_bytes(8, "little") + text

    def append(self, name: str, piece: Tensor) -> None:
        """Write the next piece of a tensor.

        Args:
            name: name of the tensor.
            piece: values on the CPU, contiguous.

        Raises:
            ValueError: the piece is larger than the rest of the tensor.
            OSError: the file system refused to write.
        """
        position, end = self._places[name]
        if position + piece.nbytes > end:
            raise ValueError(f"{self._path}: {name!r} has {end - position} bytes left, and {piece.nbytes} came.")
        self._write(piece.detach().reshape(-1).view(torch.uint8).numpy().data, position)
        self._places[name] = position + piece.nbytes, end

    def _write(self, data: memoryview, position: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, position)
            data, position = data[written:], position + written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Close the file; raise ValueError if it lacks a part of a tensor, unless another error is being raised."""
        os.close(self._descriptor)
        incomplete = [name for name, (position, end) in self._places.items() if position < end]
        if kind is None and incomplete:
            raise ValueError(f"{self._path} lacks values of {', '.join(incomplete[:3])}.")
