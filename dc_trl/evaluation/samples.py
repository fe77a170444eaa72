"""Sampled answers on disk, written as they come, so that an interrupted evaluation can go on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..files import append_json, read_object, read_text, write_json, write_text


SETTINGS_FILE, SAMPLES_FILE = "settings.json", "samples.jsonl"


class Sample(NamedTuple):
    """One sampled answer, as a line of the file."""

    id: str  # of the problem
    sample: int  # 0, 1, …, k − 1
    seed: int
    completion: str
    tokens: int
    truncated: bool
    answer: str | None  # canonical form of the boxed answer; None: there is none
    correct: bool | None  # None: the gold answer cannot be graded
    failure: str | None = None  # why grading failed


class SampleStore:
    """The file of the samples of one benchmark by one engine, a JSON object in each line.

    `add` appends a line. One that a kill cut short is removed, and its sample is drawn again.

    Args:
        folder: is made when it is missing.
        settings: what the samples depend on. A folder that was begun with other settings is refused.

    Raises:
        ValueError: the folder holds samples that were drawn with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._require_same(json.loads(json.dumps(settings)))
        self.samples = self._read()

    def add(self, sample: Sample) -> None:
        """Store a sample; when this returns it is in the file."""
        append_json(self.folder / SAMPLES_FILE, sample._asdict())
        self.samples[sample.id, sample.sample] = sample

    def _require_same(self, settings: dict[str, Any]) -> None:
        path = self.folder / SETTINGS_FILE
        if not path.exists():
            write_json(path, settings)
            return
        begun = read_object(path)
        for name in begun | settings:
            if begun.get(name) != settings.get(name):
                raise ValueError(
                    f"{name}={settings.get(name)!r}: {self.folder} holds samples that were drawn with {name}="
                    f"{begun.get(name)!r}. Choose another output directory, or the same {name} to continue."
                )

    def _read(self) -> dict[tuple[str, int], Sample]:
        path = self.folder / SAMPLES_FILE
        text = read_text(path) if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_text(path, whole)
        samples = {}
        for number, line in enumerate(whole.splitlines(), 1):
            if line.strip():
                try:
                    sample = Sample(**json.loads(line))
                except (ValueError, TypeError) as error:  # no JSON, or other fields
                    raise ValueError(f"{path}: line {number} is no sample ({error}): remove the line.") from error
                samples[sample.id, sample.sample] = sample
        return samples
