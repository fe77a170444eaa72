"""When and on what a run was started: a file with one entry for each start."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..files import read_text, write_text


STARTS_FILE = "starts.json"  # a resumed run has an entry for each start
_LIBRARIES = ("dc_trl", "trl", "transformers", "torch", "vllm")


def record_start(folder: Path, step: int, device: str, processes: int) -> None:
    """Add a start of a run to its file. The file does not name the machine.

    Args:
        folder: output directory of the run.
        step: that it starts from: 0, or that of the checkpoint.
        device: name of the device of each process, as `device_name` returns it.
        processes: number of training processes.
    """
    start = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "device": device,
        "processes": processes,
        "versions": {name: found for name in _LIBRARIES if (found := installed_version(name))},
    }
    starts = [*read_starts(folder), start] if step > 0 else [start]
    write_text(folder / STARTS_FILE, json.dumps(starts, indent=2, ensure_ascii=False) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Read the starts of a run, oldest first; [] where it has recorded none."""
    path = folder / STARTS_FILE
    return json.loads(read_text(path)) if path.is_file() else []


def cpu_name() -> str:
    """Return the processor's model and the number of cores that this process may use."""
    path = Path("/proc/cpuinfo")  # this file names the model, where there is one
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, platform.processor() or platform.machine())
    # On systems other than Linux, all cores that there are.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return f"{model}, {cores} {'core' if cores == 1 else 'cores'}"


def installed_version(name: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
