"""What a run or the doctor says of a machine."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


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
