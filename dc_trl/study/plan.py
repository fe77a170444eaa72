"""What a study runs: sweep files with a common base, and each pair of a cell and a seed once, whoever asks for it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ablation.plan import Job, Sweep, Variant, as_number, load_sweep, show
from ..files import read_yaml


BASE_FILE = "base.yaml"

Cell = Mapping[str, Any]  # the fields in which a run differs from the base, apart from its seed


def cell_name(cell: Cell) -> str:
    """A cell in words, the same for equal cells: its fields in alphabetical order; "base" for none."""
    return ",".join(f"{name}={_shown(value)}" for name, value in sorted(cell.items())) or "base"


def _shown(value: Any) -> str:
    # YAML reads 1e-4 as a text and 1.0e-4 as a number, which are the same setting.
    number = as_number(value)
    return show(value) if number is None else f"{number:g}"


@dataclass(frozen=True)
class Study:
    """The sweeps of a folder, and the settings that all of them start from."""

    base: Mapping[str, Any]
    sweeps: tuple[Sweep, ...]

    def cell(self, sweep: Sweep, variant: Variant) -> Cell:
        """What a variant of a sweep changes in the base."""
        settings = sweep.settings(variant)
        return {name: value for name, value in settings.items() if _shown(self.base.get(name)) != _shown(value)}

    def jobs(self, output: Path) -> list[Job]:
        """The runs: the first seed of every sweep first, and a run that two sweeps ask for once.

        A run's folder is named by its cell, so that a sweep that is changed keeps the runs that it still asks for.
        """
        jobs: dict[Path, Job] = {}
        for seed in sorted({seed for sweep in self.sweeps for seed in sweep.seeds}):
            for sweep in self.sweeps:
                for variant in sweep.variants if seed in sweep.seeds else ():
                    cell = self.cell(sweep, variant)
                    named = Variant(cell_name(cell), dict(cell))
                    folder = output / _within_limits(named.folder) / f"seed-{seed}"
                    settings = sweep.settings(variant) | {"seed": seed, "output_dir": str(folder)}
                    jobs.setdefault(folder, Job(named, seed, folder, settings))
        return list(jobs.values())


def _within_limits(folder: str) -> str:
    """A folder's name as it is, or its beginning and a hash: file systems end at 255 bytes."""
    return folder if len(folder) <= 200 else f"{folder[:180]}-{hashlib.sha256(folder.encode()).hexdigest()[:12]}"


def load_study(folder: Path, names: Sequence[str] = (), seeds: Sequence[int] | None = None) -> Study:
    """Reads the sweep files of a study.

    Args:
        folder: with `base.yaml`, the configuration that all sweeps name as `config`, and a file for each sweep.
        names: of the sweeps that are wanted, without suffix; by default all.
        seeds: take the place of the sweeps' own.

    Raises:
        ValueError: a name is no sweep of the folder, or a file contradicts itself; the message names it.
        OSError: a file cannot be read.
    """
    files = {file.stem: file for file in sorted(folder.glob("*.yaml")) if file.name != BASE_FILE}
    for name in names:
        if name not in files:
            raise ValueError(f"sweep={name!r} is not in {folder}: choose of {', '.join(files)}.")
    base = folder / BASE_FILE
    return Study(read_yaml(base), tuple(load_sweep(files[name], base, seeds=seeds) for name in names or files))
