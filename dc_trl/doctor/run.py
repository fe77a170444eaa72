"""Runs the checks, each in its own process with a time limit, and writes what they found for an issue."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from ..files import append_text, open_in_place
from ..quantization.schemes import SCHEMES
from ..secrets import HIDDEN, is_secret_name, without_secrets
from ..serving.guard import temporary_folder


DEFAULT_SCHEMES = ("bf16", "fp8", "int8", "int4")
_PACKAGES = ("dc_trl", "torch", "transformers", "trl", "vllm", "accelerate", "peft", "compressed-tensors", "datasets")
_GRACE = 15.0  # seconds that a process and its server have to end by themselves


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
    status: str  # "passed" or "failed"
    seconds: float = 0.0
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)


def plan_checks(schemes: Sequence[str], servers: bool = True) -> list[Check]:
    """Return the checks of a machine: the devices, and for each scheme a training by the replica and by a server."""
    of = "dc_trl.doctor.smoke:{}".format
    served = [scheme for scheme in schemes if servers and scheme in SCHEMES]
    return [
        Check("device", of("devices"), 90),
        *(Check(f"step:{scheme}", of("step"), 240, scheme) for scheme in schemes),
        *(Check(f"server:{scheme}", of("server"), 360, scheme) for scheme in served),
    ]


def run_checks(checks: Sequence[Check], setup: Setup) -> Generator[Result]:
    """Run the checks in their order, and yield each result as it is known.

    A check that raises, crashes or takes longer than its limit has failed, and the next one begins.
    """
    with temporary_folder("doctor") as folder:
        for number, check in enumerate(checks):
            yield _run(check, setup, folder / f"{number}.jsonl")


def _run(check: Check, setup: Setup, events: Path) -> Result:
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
    ended = f"had not ended after {check.seconds:.0f} s"
    try:
        with suppress(subprocess.TimeoutExpired):
            ended = f"ended with exit code {process.wait(check.seconds)}"
    finally:  # its server ends with it
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        process.kill()
        process.communicate()
    seconds = time.monotonic() - start
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    found = {name: value for line in lines for name, value in line.get("found", {}).items()}
    last = lines[-1] if lines and "status" in lines[-1] else {"status": "failed", "reason": f"its process {ended}"}
    return Result(check.name, last["status"], seconds, last["reason"], found)


# --- the block for an issue, without secrets and home folders


def facts() -> dict[str, str]:
    """Return the versions of packages, and the system without its name."""
    installed = {package.name: package.version for package in distributions()}
    packages = [f"{name} {installed.get(name, '(absent)')}" for name in _PACKAGES]
    system = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    return {"system": system, "packages": ", ".join(packages)}


def publishable(text: str) -> str:
    """Return a text in one line, without secrets, home folders and the name of this machine."""
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= 6:
            text = text.replace(value, HIDDEN)
    text = without_secrets(text).replace(str(Path.home()), "~")
    text = re.sub(r"/(?:home|Users)/[^/\s:;,'\"()\[\]]+", "~", text)
    text = re.sub(rf"(?<!\w){re.escape(socket.gethostname())}(?!\w)", "<host>", text)
    return " ".join(text.replace("```", "'''").split())


def summary(result: Result) -> str:
    """Return in one publishable line how a check ended, why it failed, and what it found."""
    parts = [result.reason[:300], *(f"{name} {value}" for name, value in result.found.items())]
    return f"{result.name}: {result.status} in {result.seconds:.1f} s: {publishable('; '.join(filter(None, parts)))}"


def bottom_line(results: Sequence[Result]) -> str:
    """Return one line that says in which schemes this machine trains, and what failed."""
    parts = []
    for kind, words in (("step", "the replica"), ("server", "a vLLM server")):
        schemes = [r.name.partition(":")[2] for r in results if r.name.startswith(f"{kind}:") and r.status == "passed"]
        if any(result.name.startswith(f"{kind}:") for result in results):
            parts.append(f"trains with {words} in {', '.join(schemes)}" if schemes else f"does not train with {words}")
    failed = ", ".join(result.name for result in results if result.status == "failed")
    return "bottom line: " + "; ".join(parts) + f"; failed: {failed or 'nothing'}"


def block(results: Sequence[Result], known: Mapping[str, str], log: str) -> str:
    """Return what to paste into an issue, fenced; `known` are facts by name, `log` has the tracebacks."""
    lines = [f"{name}: {publishable(value)}" for name, value in known.items()]
    lines += ["", *map(summary, results), "", bottom_line(results)]
    if any(result.status == "failed" for result in results):
        lines.append(f"log: {publishable(log)} (look through it before you attach it)")
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])
