"""Paths that a user gives. Shipped files are found from anywhere; what is missing is refused before torch loads."""

import json
import os
import shlex
from pathlib import Path

from ..version import DOCS


PACKAGE = Path(__file__).resolve().parent.parent
ADAPTER_FOLDER = "adapter"  # beside the base in a deployed checkpoint
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank in vLLM 0.31
# Suffixes of the data files that can be read, each with the reader's name in `datasets`.
READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def serve_line(folder: Path) -> str:
    """Return the shell command that serves a checkpoint; an adapter beside its base is the model `policy`."""
    config, options = folder / ADAPTER_FOLDER / "adapter_config.json", list[str]()
    if config.is_file():
        rank = json.loads(config.read_text())["r"]
        options = [*lora_options(rank), "--lora-modules", f"policy={config.parent}"]
    return shlex.join(["vllm", "serve", str(folder), *options])


def lora_options(rank: int) -> list[str]:
    """Return the options of `vllm serve` for adapters of a rank; a `ValueError` says that there are none."""
    if not 1 <= rank <= _LORA_RANKS[-1]:
        raise ValueError(f"lora_r={rank}: beside a base, vLLM takes adapters of rank 1 to {_LORA_RANKS[-1]}.")
    return ["--enable-lora", "--max-lora-rank", str(next(each for each in _LORA_RANKS if each >= rank))]


def shipped_configs() -> Path:
    """Return the folder of the shipped configurations: inside an installed package, beside it in a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def shipped(name: str) -> str:
    """Return the path of a shipped file, `configs/…` or `dc_trl/assets/…` if the working directory has none such.

    Every other name is returned as it is.
    """
    path = Path(name)
    if not path.exists():
        for first, folder in ((Path("configs"), shipped_configs()), (Path("dc_trl", "assets"), PACKAGE / "assets")):
            if first in path.parents and (found := folder / path.relative_to(first)).exists():
                return str(found)
    return name


def config_file(name: str) -> Path:
    """Return the YAML file that a user means by its path, or by the name of a shipped one, without `.yaml` or with it.

    Raises:
        ValueError: there is no such file; the message names all shipped ones.
    """
    files = {file.stem: file for file in sorted(shipped_configs().glob("*.yaml"))}
    path = Path(shipped(name))
    found = path if path.is_file() else files.get(name.removesuffix(".yaml"))
    if found is None:
        raise ValueError(f"config={name!r} is not a file: give the path of a YAML file, or one of {', '.join(files)}.")
    return found


def require_folder(name: str, value: str | os.PathLike[str]) -> None:
    """Refuse a folder without a name, or with a file in its place or above it."""
    if not str(value):
        raise ValueError(f"{name}='' is empty: give a directory, '.' for the present one.")
    place = next(each for each in (Path(value), *Path(value).absolute().parents) if os.path.lexists(each))
    if not place.is_dir():
        raise ValueError(f"{name}={str(value)!r}: {place} is a file: choose another directory.")


def require_model_path(name: str | None, option: str = "model_name_or_path") -> None:
    """Refuse a model that is neither a directory with a model nor a possible Hub id."""
    if not name:
        raise ValueError(f"{option} is not set: give a Hub id or a directory.")
    path = Path(name).expanduser()
    if (path / ADAPTER_FOLDER / "adapter_config.json").is_file():
        raise ValueError(
            f"{option}={name!r} has an adapter beside its base, without which it is another policy: serve both with "
            f"`{serve_line(path)}`, or deploy with lora_deployment='merged'."
        )
    # `runs/` is where the shipped configurations put what they make.
    is_path = path.exists() or name.startswith((".", "~", os.sep, "runs/")) or name.count("/") > 1
    if not is_path or (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise ValueError(f"{option}={name!r} holds an adapter: give its model; {DOCS}/lora.md tells how to go on.")
    what = "has no config.json, so it holds no model" if path.is_dir() else "does not exist as a directory"
    make = ", or make it (`make real-model` in a clone)" if path.parts[-2:] == ("runs", "real_model") else ""
    raise ValueError(f"{option}={name!r} {what}: give the Hub id of a model, or its directory{make}.")


def is_data_file(name: str) -> bool:
    """Return whether the name of a data set means a local file, and not the Hub or a built-in one."""
    path = Path(name).expanduser()
    return path.suffix in READERS or path.is_file()


def require_data_file(name: str, option: str = "dataset_name") -> None:
    """Refuse a data file that is missing or of another kind."""
    path = Path(name).expanduser()
    if path.suffix not in READERS or not path.is_file():
        raise ValueError(f"{option}={name!r} is no data file: give one of {', '.join(READERS)} that exists.")
