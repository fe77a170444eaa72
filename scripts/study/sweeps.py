"""What the study runs: sweep files with a common base, and each pair of a cell and a seed once."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dc_trl.files import read_yaml


SWEEPS = Path(__file__).with_name("sweeps")
BASE_FILE = "base.yaml"
KEYS = ("fixed", "grid", "list", "seeds", "reference", "pairs", "own_family", "message")

Cell = Mapping[str, Any]  # the fields in which a run differs from the base, apart from its seed


@dataclass(frozen=True)
class Variant:
    """A point of a sweep: its name in tables, and the fields that make it."""

    name: str
    fields: dict[str, Any] = field(hash=False)


# Forms that the package had when the study was made, and where they are now.
OWN_FORMS = {"complete": "own_forms:complete"}
# What the package no longer has, as cells call it, and the last commit that has it: the lag as log π_Q − log π_inf,
# with π_Q the present weights as they are deployed. There `lag_by_format` is called `lag`.
GONE = {"lag_by_format": "69d65d94"}


@dataclass(frozen=True)
class Sweep:
    """A sweep file: variants that share `base`, their seeds, and the variant that the others are compared with.

    Each of `pairs` asks whether its first variant ends above its second; with `own_family`, their p-values are
    corrected among themselves and not with those of other sweeps. `message` is the title of the figure.
    """

    name: str
    base: dict[str, Any]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    reference: Variant
    pairs: tuple[tuple[Variant, Variant], ...] = ()
    own_family: bool = False
    message: str = ""

    def settings(self, variant: Variant) -> dict[str, Any]:
        """The settings of a variant, as lines and sweep files name them, without seed and output directory."""
        return self.base | variant.fields

    def configuration(self, variant: Variant) -> dict[str, Any]:
        """The settings as a configuration has them today."""
        settings = self.settings(variant)
        form = settings.get("constraint_form")
        return settings | ({"constraint_form": OWN_FORMS[form]} if form in OWN_FORMS else {})

    @property
    def on_cpu(self) -> bool:
        """Whether no run of the sweep needs a GPU."""
        return all(self.settings(variant).get("use_cpu") for variant in self.variants)

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The fields that tell the variants apart: those that are numbers in every variant, and the others."""
        names = {name: None for variant in self.variants for name in variant.fields}
        missing = [n for n in names if any(as_number(variant.fields.get(n)) is None for variant in self.variants)]
        return tuple(name for name in names if name not in missing), tuple(missing)


@dataclass(frozen=True)
class Job:
    """One training run: a cell with a seed, the folder of the run, and its whole configuration."""

    cell: Cell = field(hash=False)
    seed: int
    folder: Path
    settings: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> tuple[str, int]:
        """What tells runs apart: the name of the cell, and the seed."""
        return cell_name(self.cell), self.seed

    @property
    def name(self) -> str:
        """The run's folder below the output directory."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True)
class Study:
    """Sweeps, and the settings that all of them start from."""

    base: Mapping[str, Any]
    sweeps: tuple[Sweep, ...]

    def cell(self, sweep: Sweep, variant: Variant) -> Cell:
        """What a variant of a sweep changes in the base."""
        settings = sweep.settings(variant)
        return {name: value for name, value in settings.items() if _shown(self.base.get(name)) != _shown(value)}

    def jobs(self, output: Path) -> list[Job]:
        """List the runs: the first seed of every sweep first, and a run that two sweeps ask for once.

        A run's folder is named by its cell, so that a sweep that is changed keeps the runs that it still asks for.
        """
        jobs: dict[Path, Job] = {}
        for seed in sorted({seed for sweep in self.sweeps for seed in sweep.seeds}):
            for sweep in self.sweeps:
                for variant in sweep.variants if seed in sweep.seeds else ():
                    cell = self.cell(sweep, variant)
                    folder = output / folder_name(cell) / f"seed-{seed}"
                    settings = sweep.configuration(variant) | {"seed": seed, "output_dir": str(folder)}
                    jobs.setdefault(folder, Job(cell, seed, folder, settings))
        return list(jobs.values())


def load_study(folder: Path = SWEEPS, names: Sequence[str] = (), seeds: Sequence[int] | None = None) -> Study:
    """Read the sweep files of a folder.

    Args:
        folder: with `base.yaml`, the configuration that all sweeps start from, and a file for each sweep.
        names: of the wanted sweeps, without suffix; all by default.
        seeds: take the place of the sweeps' own.

    Raises:
        ValueError: a name is no sweep of the folder, or a file contradicts itself.
        OSError: a file cannot be read.
    """
    files = {file.stem: file for file in sorted(folder.glob("*.yaml")) if file.name != BASE_FILE}
    for name in names:
        if name not in files:
            raise ValueError(f"sweep={name!r} is not in {folder}: choose one of {', '.join(files)}.")
    base = read_yaml(folder / BASE_FILE)
    return Study(base, tuple(load_sweep(files[name], base, seeds) for name in names or files))


def load_sweep(path: Path, base: Mapping[str, Any], seeds: Sequence[int] | None = None) -> Sweep:
    """Read a sweep file.

    Args:
        path: YAML with `fixed` (field → value, on top of the base), either `grid` (field → values: all combinations)
            or `list` (name of a variant → its fields), `seeds`, `reference` (a variant's name; else the first),
            `pairs` of variants' names, `own_family` (whether these are corrected among themselves), and `message`,
            what its figure shows in a sentence.
        base: the study's base.
        seeds: take the place of the file's.

    Raises:
        ValueError: the file contradicts itself; the message names the key.
    """
    sweep = read_yaml(path)
    if unknown := sweep.keys() - set(KEYS):
        raise ValueError(f"{path}: {min(unknown)!r} is unknown: a sweep has {', '.join(KEYS)}.")
    if ("grid" in sweep) == ("list" in sweep):
        raise ValueError(f"{path}: give one of `grid` (field → values) and `list` (name → fields).")
    if "grid" in sweep:
        grid = sweep["grid"]
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        variants = [Variant(",".join(f"{name}={show(point[name])}" for name in grid), point) for point in points]
    else:
        variants = [Variant(name, fields or {}) for name, fields in sweep["list"].items()]
    named = {variant.name: variant for variant in variants}
    reference = sweep.get("reference", variants[0].name)
    pairs = sweep.get("pairs", [])
    for key, names in [("reference", [reference]), *(("pairs", pair) for pair in pairs)]:
        if unknown := [name for name in names if name not in named]:
            raise ValueError(f"{path}: {key}={unknown[0]!r} is no variant: choose one of {', '.join(named)}.")
    return Sweep(
        name=path.stem,
        base=dict(base) | sweep.get("fixed", {}),
        variants=tuple(variants),
        seeds=tuple(sweep["seeds"] if seeds is None else seeds),
        reference=named[reference],
        pairs=tuple((named[first], named[second]) for first, second in pairs),
        own_family=sweep.get("own_family", False),
        message=sweep.get("message", ""),
    )


def by_value(variants: Sequence[Variant], field: str) -> dict[str, list[Variant]]:
    """Sort variants by the value of a field, as it stands in names."""
    found: dict[str, list[Variant]] = {}
    for variant in variants:
        found.setdefault(show(variant.fields[field]), []).append(variant)
    return found


def cell_name(cell: Cell) -> str:
    """Return a cell in words, the same for equal cells: its fields in alphabetical order, or "base" for none."""
    return ",".join(f"{name}={_shown(value)}" for name, value in sorted(cell.items())) or "base"


def folder_name(cell: Cell) -> str:
    """Return a cell's name as the name of a folder; a long one is cut, because file systems end at 255 bytes."""
    name = re.sub(r"[^\w=.,+-]+", "_", cell_name(cell)).lstrip(".")
    return name if len(name) <= 200 else f"{name[:180]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def show(value: Any) -> str:
    """Return a value as it stands in names."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_number(value: Any) -> float | None:
    """Return the number that a value of a configuration means, or None. YAML reads 1e-6 as a string."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    # YAML reads 1e-4 as a text and 1.0e-4 as a number, which are the same setting.
    number = as_number(value)
    return show(value) if number is None else f"{number:g}"
