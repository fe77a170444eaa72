"""Sampled answers on disk, written as they come, so that an interrupted evaluation can go on."""

import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..files import lock_folder, read_object, write_bytes, write_text


SETTINGS_FILE = "settings.json"

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),  # of the problem
        pa.field("sample", pa.int32(), nullable=False),  # 0, 1, …, k − 1
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("answer", pa.string()),  # canonical form of the boxed answer; null: there is none
        pa.field("correct", pa.bool_()),  # null: the gold answer cannot be graded
    ]
)
_MERGE = 64  # small files that are merged into one


class Sample(NamedTuple):
    """One sampled answer, as a row of the files."""

    id: str
    sample: int
    seed: int
    completion: str
    tokens: int
    truncated: bool
    answer: str | None
    correct: bool | None


class SampleStore:
    """Folder of Parquet files with the samples of one benchmark by one engine.

    Every `add` writes one file in one step. Small files are merged from time to time. `pandas.read_parquet(folder)` or
    `datasets` read all of them at once.

    Args:
        folder: is made when it is missing.
        settings: what the samples depend on. A folder that was begun with other settings is refused.

    Raises:
        ValueError: the folder holds samples that were drawn with other settings, or another process writes into it.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError:
            raise ValueError(
                f"{self.folder} is in use by another evaluation: choose another output directory."
            ) from None
        try:
            self._require_same(dict(settings))
        except ValueError:
            os.close(self._lock)
            raise
        for unfinished in self.folder.glob(".*.tmp"):
            unfinished.unlink()
        self._small = sorted(self.folder.glob("part-*.parquet"))
        numbers = [int(file.stem.rsplit("-", 1)[1]) for file in self.folder.glob("*.parquet")]
        self._next = 1 + max(numbers, default=0)
        # If a merge was interrupted, a sample is in the merged file and in its part.
        self.samples: dict[tuple[str, int], Sample] = {}
        for file in self.folder.glob("*.parquet"):
            self.samples |= {(sample.id, sample.sample): sample for sample in _read(file)}

    def close(self) -> None:
        """Merge the remaining small files and unlock the folder."""
        self.merge()
        os.close(self._lock)

    def _require_same(self, settings: dict[str, Any]) -> None:
        path = self.folder / SETTINGS_FILE
        settings = json.loads(json.dumps(settings))
        if not path.exists():
            write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        begun = read_object(path)
        for name in begun | settings:
            if begun.get(name) != settings.get(name):
                raise ValueError(
                    f"{name}={settings.get(name)!r}: {self.folder} holds samples that were drawn with {name}="
                    f"{begun.get(name)!r}. Choose another output directory, or the same {name} to continue."
                )

    def add(self, samples: Iterable[Sample]) -> None:
        """Store samples; when this returns they are in a file."""
        new = list(samples)
        if not new:
            return
        self._small.append(self._write("part", new))
        self.samples |= {(sample.id, sample.sample): sample for sample in new}
        if len(self._small) >= _MERGE:
            self.merge()

    def merge(self) -> None:
        """Merge the small files into one."""
        if len(self._small) < 2:
            return
        self._write("merged", [sample for file in self._small for sample in _read(file)])
        for file in self._small:
            file.unlink()
        self._small = []

    def _write(self, kind: str, samples: list[Sample]) -> Path:
        path = self.folder / f"{kind}-{self._next:06d}.parquet"
        self._next += 1
        content = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([sample._asdict() for sample in samples], schema=_SCHEMA), content)
        write_bytes(path, content.getvalue())
        return path


def _read(file: Path) -> list[Sample]:
    try:
        return [Sample(**row) for row in pq.read_table(file, schema=_SCHEMA).to_pylist()]
    except (pa.ArrowException, ValueError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} holds no samples ({reason}): remove it, and they are drawn again.") from error
