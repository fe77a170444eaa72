"""Safetensors files, written while their tensors are made: byte for byte those of `safetensors`."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor


# How safetensors calls the formats, in the order in which it puts them into a file.
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
    """A tensor as it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class TensorFile:
    """A safetensors file of tensors that are known by name, dtype and shape; their values come piece by piece.

    Nothing is held: a piece is copied from where it was made to its place in the file. That takes half the time of
    mapping a file in shared memory and writing to the map, whose pages would be zeroed first, and a full file system
    is an error and not a signal that kills.

    Args:
        path: where no file is yet.
        tensors: by name.

    Raises:
        OSError: the file system refused.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec]):
        self.size = 0
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}  # where the next piece goes, and the tensor ends
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
        """Writes the next piece of a tensor.

        Args:
            name: of the tensor.
            piece: on the CPU, contiguous.

        Raises:
            ValueError: the tensor has less room left.
            OSError: the file system refused.
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
        """Closes the file; where no error is on its way, one that lacks a part of a tensor is a ValueError."""
        os.close(self._descriptor)
        lacking = [name for name, (position, end) in self._places.items() if position < end]
        if kind is None and lacking:
            raise ValueError(f"{self._path} lacks values of {', '.join(lacking[:3])}.")
