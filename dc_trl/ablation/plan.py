"""What a sweep file asks for: variants, seeds, and a training run for each pair, with its settings and its folder."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..files import read_yaml
from ..settings.paths import config_file


CONFIG_FILE = "config.yaml"  # in a job's folder: its whole configuration
# Fields that each job has of its own, and where they come from.
RESERVED = {
    "seed": "list the seeds under `seeds`",
    "output_dir": "give --output",
    "resume_from_checkpoint": "leave it out: an unfinished job is resumed",
}
KEYS = ("config", "fixed", "grid", "list", "seeds", "metrics", "reference")


@dataclass(frozen=True)
class Variant:
    """A point of the sweep: its name in tables, the fields that make it, and its folder under the output directory."""

    name: str
    fields: dict[str, Any] = field(hash=False)

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w=.,+-]+", "_", self.name).lstrip(".")


@dataclass(frozen=True)
class Job:
    """One training run."""

    variant: Variant
    seed: int
    folder: Path
    settings: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.variant.folder}/seed-{self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked in itself; whether its fields exist is for the training script's parser to say.

    `base` holds the settings that all variants share. `metrics` are the columns of the table, empty for the usual
    ones. The other variants are compared with the `reference`.
    """

    name: str
    base: dict[str, Any]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    reference: Variant

    def settings(self, variant: Variant) -> dict[str, Any]:
        """The configuration of a variant, without seed and output directory."""
        return self.base | variant.fields

    def jobs(self, output: Path) -> list[Job]:
        """The runs, all variants with the first seed first: a sweep that ends early has something of each."""
        return [
            Job(variant, seed, folder, self.settings(variant) | {"seed": seed, "output_dir": str(folder)})
            for seed in self.seeds
            for variant in self.variants
            for folder in [output / variant.folder / f"seed-{seed}"]
        ]

    @property
    def on_cpu(self) -> bool:
        """Whether every variant asks for the CPU, so that no run needs a GPU."""
        return all(self.settings(variant).get("use_cpu") for variant in self.variants)

    @property
    def axis(self) -> str | None:
        """The field that alone tells the variants apart, by a number; None where there is no such field."""
        return self.axes[0] if len(self.axes) == 1 else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The fields that tell the variants apart, all by a number in each variant; none where it is not so."""
        names = tuple({name: None for variant in self.variants for name in variant.fields})
        values = [as_number(variant.fields.get(name)) for variant in self.variants for name in names]
        return names if None not in values else ()


def load_sweep(
    path: str | Path,
    base: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
) -> Sweep:
    """Reads a sweep file.

    Args:
        path: YAML with `config` (file of the base configuration, from the working directory, beside this file, or of
            those that ship), `fixed` (field → value, on top of it), either `grid` (field → list of values: all
            combinations) or `list` (name of a variant → its fields, none for the base itself), and, if wanted, `seeds`
            (0, 1, 2 by default), `metrics` (columns of the table) and `reference` (name of the variant that the others
            are compared with, the first one by default).
        base: takes the place of `config`.
        overrides: on top of `fixed`.
        seeds: take the place of `seeds`.

    Raises:
        ValueError: the file contradicts itself; the message names the key.
        OSError: a file cannot be read.
    """
    path = Path(path)
    sweep = read_yaml(path)
    for key in sweep:
        if key not in KEYS:
            raise ValueError(f"{path}: {key!r} is unknown: a sweep has {', '.join(KEYS)}.")
    base_file = _base_file(path, sweep) if base is None else Path(base)
    fixed = _mapping(path, sweep, "fixed") | dict(overrides or {})
    variants = _variants(path, sweep)
    # A variant of a list may differ from what is fixed; a value of a grid may not.
    _require_free(path, variants, fixed, set(fixed if "grid" in sweep else overrides or {}))
    return Sweep(
        name=path.stem,
        seeds=_seeds(path, sweep.get("seeds", [0, 1, 2]) if seeds is None else list(seeds)),
        metrics=_metrics(path, sweep.get("metrics") or []),
        reference=_reference(path, sweep, variants),
        base=read_yaml(base_file) | fixed,
        variants=tuple(variants),
    )


def _base_file(path: Path, sweep: Mapping[str, Any]) -> Path:
    if not isinstance(sweep.get("config"), str):
        raise ValueError(f"{path}: config={sweep.get('config')!r} is invalid: name the base configuration's file.")
    beside = path.parent / sweep["config"]
    return beside if beside.is_file() and not Path(sweep["config"]).is_file() else config_file(sweep["config"])


def _require_free(path: Path, variants: Sequence[Variant], fixed: Mapping[str, Any], not_swept: set[str]) -> None:
    """Refuses fields that each job has of its own, and fields that are both fixed and swept."""
    swept = {name for variant in variants for name in variant.fields}
    for name, remedy in RESERVED.items():
        if name in swept or name in fixed:
            raise ValueError(f"{path}: {name} is each job's own: {remedy}.")
    clash = sorted(swept & not_swept)
    if clash:
        raise ValueError(f"{path}: {clash[0]} is both fixed and swept: remove one of the two.")


def _seeds(path: Path, seeds: Any) -> tuple[int, ...]:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"{path}: seeds={seeds!r} is invalid: list different whole numbers, at least 0.")
    return tuple(seeds)


def _metrics(path: Path, metrics: Any) -> tuple[str, ...]:
    if not isinstance(metrics, list) or not all(isinstance(name, str) for name in metrics):
        raise ValueError(f"{path}: metrics={metrics!r} is invalid: list names of metrics.")
    return tuple(metrics)


def _reference(path: Path, sweep: Mapping[str, Any], variants: Sequence[Variant]) -> Variant:
    names = {variant.name: variant for variant in variants}
    reference = sweep.get("reference", variants[0].name)
    if reference not in names:
        raise ValueError(f"{path}: reference={reference!r} is no variant: choose one of {', '.join(names)}.")
    return names[reference]


def _variants(path: Path, sweep: Mapping[str, Any]) -> list[Variant]:
    if ("grid" in sweep) == ("list" in sweep):
        raise ValueError(f"{path}: give one of `grid` (field → values) and `list` (name → fields).")
    if "grid" in sweep:
        grid = _mapping(path, sweep, "grid")
        for name, values in grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"{path}: grid: {name}={values!r} is invalid: list its values.")
        points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        variants = [Variant(",".join(f"{name}={show(point[name])}" for name in grid), point) for point in points]
    else:
        named = _mapping(path, sweep, "list")
        variants = [Variant(str(name), _mapping(path, named, name)) for name in named]
    if not variants or not variants[0].name:
        raise ValueError(f"{path}: the sweep has no variant: give `grid` a field, or `list` a name.")
    _require_own_folder_names(path, variants)
    return variants


def _require_own_folder_names(path: Path, variants: Sequence[Variant]) -> None:
    folders: dict[str, str] = {}
    for variant in variants:
        if not variant.folder or len(variant.folder.encode()) > 200:
            raise ValueError(
                f"{path}: variant {variant.name[:80]!r} cannot name a folder: give it a name of its own with `list`."
            )
        if variant.folder in folders:
            raise ValueError(
                f"{path}: variants {folders[variant.folder]!r} and {variant.name!r} share the folder "
                f"{variant.folder!r}: remove one, or give them other names."
            )
        folders[variant.folder] = variant.name


def _mapping(path: Path, mapping: Mapping[Any, Any], key: Any) -> dict[str, Any]:
    value = mapping.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{path}: {key}={value!r} is invalid: map names to values.")
    return value


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Fields and their values from words FIELD=VALUE, the value read as YAML.

    Raises:
        ValueError: names the word.
    """
    overrides = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"set={word!r} is invalid: write FIELD=VALUE.")
        try:
            overrides[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"set={word!r} is invalid: {value!r} is no YAML value.") from error
    return overrides


def show(value: Any) -> str:
    """A value as it stands in names and axes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_number(value: Any) -> float | None:
    """The number that a value of a configuration means; YAML reads 1e-6 as a string. None where it means none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def differing_settings(job: Job) -> list[str]:
    """How the settings that a job's folder was begun with differ from the present ones, a text for each field.

    The folder itself does not count, so that a sweep can be moved.
    """
    file = job.folder / CONFIG_FILE
    if not file.exists():
        return []
    old, new, absent = read_yaml(file), job.settings, object()
    differing = []
    for name in sorted((old.keys() | new.keys()) - {"output_dir"}):
        before, after = old.get(name, absent), new.get(name, absent)
        if before != after and (as_number(before) is None or as_number(before) != as_number(after)):
            shown = ["unset" if value is absent else show(value) for value in (before, after)]
            differing.append(f"{name} was {shown[0]} and is now {shown[1]}")
    return differing
