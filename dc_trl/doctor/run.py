"""Runs the checks: each in its own process with a time limit, and all of them within a total time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from ..files import append_text, open_in_place
from ..serving.guard import temporary_folder


# Those of `dc_trl.quantization.schemes`, which loads torch: the doctor has to speak where torch cannot be loaded.
SERVED_SCHEMES = ("bf16", "fp8", "fp8_block", "int8", "int4", "int4_g32")
REPLICA_SCHEMES = ("int3", "int2")
DEFAULT_SCHEMES = ("bf16", "fp8", "int8", "int4")
_GRACE = 15.0  # seconds that a process and its server have to end by themselves
ENDING = _GRACE + 3.0  # seconds that are kept, so that the last check is over in time


@dataclass(frozen=True)
class Setup:
    """What all checks need to know."""

    model: str  # Hub id or directory
    device: str | None  # None: the accelerator that PyTorch finds, or the CPU
    log: str  # file for the output of checks and servers
    serve_options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """One thing that is checked: its name in the table, how long it may take, and the scheme, if it has one.

    `probe` is the function that tries it, as "module:function"; see `dc_trl.doctor.smoke`.
    """

    name: str
    probe: str
    seconds: float
    scheme: str | None = None


@dataclass(frozen=True)
class Result:
    """Result of a check: its name, how it ended after how many seconds, why, and what it had found by then."""

    name: str
    status: Literal["passed", "failed", "left out"]
    seconds: float = 0.0
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)


def plan_checks(schemes: Sequence[str], servers: bool = True) -> list[Check]:
    """Return the checks of a machine: the devices, and for each scheme a training by the replica and by a server."""
    of = "dc_trl.doctor.smoke:{}".format
    served = [scheme for scheme in schemes if servers and scheme in SERVED_SCHEMES]
    return [
        Check("device", of("devices"), 90),
        *(Check(f"step:{scheme}", of("step"), 240, scheme) for scheme in schemes),
        *(Check(f"server:{scheme}", of("server"), 360, scheme) for scheme in served),
    ]


def run_checks(checks: Sequence[Check], setup: Setup, seconds: float) -> Generator[Result]:
    """Run the checks in their order within so many seconds, and yield each result as it is known.

    A check that raises, crashes or takes longer than its limit has failed, and the next one begins. One that the time
    for all of them cuts short is left out.
    """
    end = time.monotonic() + seconds
    with temporary_folder("doctor") as folder:
        for number, check in enumerate(checks):
            left = end - time.monotonic() - ENDING
            if left < 1:
                yield Result(check.name, "left out", reason="no time was left")
            else:
                yield _run(check, setup, folder / f"{number}.jsonl", left)


def _run(check: Check, setup: Setup, events: Path, left: float) -> Result:
    append_text(Path(setup.log), f"\n=== {check.name}\n")
    # Temporary files go into the doctor's folder. Nothing is asked of the Hub for a model that is here.
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment = {**os.environ, **quiet, "TMPDIR": str(events.parent)}
    if Path(setup.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if check.scheme is not None and setup.device != "cpu":  # a training would take all GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    arguments = [str(events), json.dumps(asdict(check)), json.dumps(asdict(setup))]
    start = time.monotonic()
    with open_in_place(Path(setup.log), os.O_WRONLY | os.O_APPEND) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dc_trl.doctor.smoke", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the doctor
        )
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(min(check.seconds, left))
    finally:
        _end(process)
    seconds = time.monotonic() - start
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    found = {name: value for line in lines for name, value in line.get("found", {}).items()}
    if lines and "status" in lines[-1]:
        return Result(check.name, lines[-1]["status"], seconds, lines[-1]["reason"], found)
    if code is not None:
        ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return Result(check.name, "failed", seconds, f"its process was ended by {ended}", found)
    if check.seconds <= left:
        return Result(check.name, "failed", seconds, f"it had not ended after {check.seconds:.0f} s", found)
    return Result(check.name, "left out", seconds, f"no time: it was stopped after {seconds:.0f} s", found)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, by force where it does not end by itself."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=1)  # a server's watchdog removes what the server leaves
    for each in alive:
        each.kill()
