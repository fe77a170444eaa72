"""Runs checks one after the other in a process beside this one, each with a limit, all of them within a time."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from ..files import append_text, open_in_place
from ..settings.secrets import without_secrets
from .checks import DEVICE, IMPORT, Check, Result, Setup


_GRACE = 10.0  # seconds that a process has to end by itself, a server of its with it
_CLEANUP = 5.0  # that what it started has to clean up
ENDING = _GRACE + _CLEANUP + 3.0  # kept of the time, so that the last check is over in time
_POLL = 0.05


def run_checks(checks: Sequence[Check], setup: Setup, seconds: float) -> Generator[Result]:
    """Runs the checks in their order; the results come as they are known.

    A check that raises, crashes or takes longer than its limit has failed, and the next one begins in a fresh process.
    One that the time for all of them cuts short is left out.

    Args:
        checks: see `dc_trl.doctor.checks.plan_checks`.
        setup: for their probes.
        seconds: for all of them.
    """
    end = time.monotonic() + seconds
    passed: set[str] = set()
    took: dict[str, float] = {}  # longest check of a kind, "server" for example
    worker: Worker | None = None
    environment: dict[str, str] = {}
    imports = [check for check in checks if check.name == IMPORT]
    with tempfile.TemporaryDirectory(prefix="dc_trl-doctor-") as folder:
        try:
            for check in checks:
                kind = check.name.partition(":")[0]
                left = end - time.monotonic() - ENDING
                why = check.left_out or _missing(check, passed)
                needed = max(check.least, took.get(kind, 0.0))
                if why is None and left < needed:
                    why = f"no time: {max(left, 0):.0f} s were left, and it takes {needed:.0f} s or more here"
                if why is not None:
                    yield Result(check.name, "left out", reason=why)
                    continue
                result = None
                if worker is None:
                    worker = Worker(setup, Path(folder), environment)
                    if IMPORT in check.after:  # has passed before, and is no part of this check's time
                        result = worker.run(imports[0], left)
                        result = None if result.status == "passed" else replace(result, name=check.name)
                if result is None:
                    result = worker.run(check, end - time.monotonic() - ENDING)
                if check.name == DEVICE and result.status == "passed":
                    environment = one_gpu(len(result.found["devices"]), setup.device)
                    if environment:
                        setup = replace(setup, device="cuda")
                        worker.over = True
                if worker.over:
                    worker.end()
                    worker = None
                if result.status == "passed":
                    passed.add(check.name)
                    took[kind] = max(result.seconds, took.get(kind, 0.0))
                yield result
        finally:
            if worker is not None:
                worker.end()


def _missing(check: Check, passed: set[str]) -> str | None:
    missing = [name for name in check.after if name not in passed]
    return f"it needs {missing[0]!r}, which did not pass" if missing else None


class Worker:
    """A process that runs probes, see `dc_trl.doctor.worker`; its output goes to the log.

    Args:
        setup: for the probes.
        folder: for the file of events.
        environment: further environment variables.

    Attributes:
        over: whether it runs no further check.
    """

    def __init__(self, setup: Setup, folder: Path, environment: Mapping[str, str]):
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        self._events, self._read = Path(name), 0
        self.over = False
        # Nothing is asked of the Hub for a model that is here, and nothing is told to anyone.
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if Path(setup.model).is_dir():
            quiet["HF_HUB_OFFLINE"] = "1"
        with open_in_place(Path(setup.log), os.O_WRONLY | os.O_APPEND) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dc_trl.doctor.worker", name],
                env={**os.environ, **quiet, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the doctor
            )
        self._log = Path(setup.log)
        self._send(asdict(setup))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `run` sees
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def run(self, check: Check, left: float) -> Result:
        """The result of one check.

        Args:
            check: what to run.
            left: seconds for all that is still to come.
        """
        append_text(self._log, f"\n=== {check.name}\n")
        start = time.monotonic()
        found: dict[str, Any] = {}
        self._send({"probe": check.probe, "scheme": check.scheme})
        while True:
            ended = self._process.poll() is not None  # before the events, so that none of them is missed
            seconds = time.monotonic() - start
            for event in self._new_events():
                if "found" in event:
                    found |= event["found"]
                elif "error" in event:
                    self.over = True
                    return Result(check.name, "failed", seconds, one_line(event["error"]), found)
                elif "left_out" in event:
                    return Result(check.name, "left out", seconds, one_line(event["left_out"]), found)
                else:
                    return Result(check.name, "passed", seconds, "", found)
            if ended:
                self.over = True
                return Result(check.name, "failed", seconds, _how_it_ended(self._process.returncode), found)
            if seconds > min(check.seconds, left):
                self.over = True
                if seconds > check.seconds:
                    reason = f"Timeout: it had not ended after {check.seconds:.0f} s"
                    return Result(check.name, "failed", seconds, reason, found)
                return Result(check.name, "left out", seconds, f"no time: it was stopped after {seconds:.0f} s", found)
            time.sleep(_POLL)

    def _new_events(self) -> list[dict[str, Any]]:
        text = self._events.read_bytes()
        whole = text.rfind(b"\n") + 1
        lines, self._read = text[self._read : whole].splitlines(), whole
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Ends the process and all that it started, by force where it does not end by itself."""
        family: list[psutil.Process] = []
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            started, family = process.children(), process.children(recursive=True)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # which has it end
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._process.kill()
        self._process.wait()
        # A server's watchdog removes what the server leaves, once that has ended.
        _kill(each for each in family if each not in started)
        psutil.wait_procs(started, _CLEANUP)
        _kill(started)
        with suppress(ProcessLookupError):  # what has lost its parents meanwhile
            os.killpg(self._process.pid, signal.SIGKILL)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def one_gpu(count: int, device: str | None) -> dict[str, str]:
    """The environment that hides all GPUs but one, where there are several: transformers would train on all of them.

    Args:
        count: of the GPUs that a process sees.
        device: that is asked for, "cuda:1" for example; None for the first.
    """
    if count < 2 or (device is not None and not device.startswith("cuda")):
        return {}
    number = int((device or "cuda").partition(":")[2] or 0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[number]}


def one_line(text: str) -> str:
    """A message without line ends and secrets."""
    return without_secrets(" ".join(text.split()))


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    memory = ", as by the system where memory runs out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{memory}"
