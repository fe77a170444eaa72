"""The doctor's findings as text, fit to be published: without names of users and hosts, home folders and secrets."""

import os
import platform
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..settings.secrets import HIDDEN, is_secret_name, without_secrets
from .checks import Result


PACKAGES = (
    *("dc_trl", "torch", "transformers", "trl", "vllm", "accelerate", "peft", "compressed-tensors", "datasets"),
    *("deepspeed", "flash-attn", "flashinfer-python", "bitsandbytes", "triton"),
)
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_ATTENTION_BACKEND")
_NOT_TRIED = "several GPUs at once, the NCCL weight stream, colocated vLLM, long completions, adapters"
_REASON = 300  # characters


@dataclass(frozen=True)
class Report:
    """All that the block tells.

    Args:
        results: of the checks.
        seconds: that they took.
        minutes: that they might have taken.
        model: name of what was sampled.
        log: file with the tracebacks.
        versions: of packages by name; None where one is not installed.
        system: operating system and Python.
        variables: of the environment, by name.
    """

    results: list[Result]
    seconds: float
    minutes: float
    model: str
    log: str
    versions: dict[str, str | None]
    system: str
    variables: dict[str, str]


def versions() -> dict[str, str | None]:
    """Installed versions of what matters here."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def system() -> str:
    """Operating system and Python, without the machine's name."""
    return f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"


def variables() -> dict[str, str]:
    """Variables of the environment that change what is measured, where they are set."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


# --- what is nobody's business ---------------------------------------------------------------------------------------


def publishable(text: str) -> str:
    """A text in one line, without secrets, home folders, and the names of this user and this machine."""
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= 6:
            text = text.replace(value, HIDDEN)
    text = without_secrets(text)
    home = str(Path.home())
    for path in sorted({home, os.path.realpath(home)} - {"/"}, key=len, reverse=True):
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", "~", text)
    text = re.sub(r"/(?:home|Users)/[^/\s:;,'\"()\[\]]+", "~", text)
    text = re.sub(r"(?<![\w.~-])/root(?![\w.-])", "~", text)
    text = re.sub(r"\b(?!127\.)\d{1,3}(?:\.\d{1,3}){3}\b", "<address>", text)
    for name in _user_names(home):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<user>", text)
    host = socket.gethostname()
    for name in (host, host.partition(".")[0]):
        if len(name) > 1 and name != "localhost":
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<host>", text)
    return " ".join(text.replace("```", "'''").split())


def _user_names(home: str) -> set[str]:
    names = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path(home).name}
    return {name for name in names if len(name) > 1 and name != "root"}


def _publishable(value: Any) -> Any:
    """The same of all texts within a value."""
    if isinstance(value, str):
        return publishable(value)
    if isinstance(value, dict):
        return {_publishable(key): _publishable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_publishable(each) for each in value]
    if isinstance(value, Result):
        return replace(value, **{field.name: _publishable(getattr(value, field.name)) for field in fields(value)})
    return value


# --- the text --------------------------------------------------------------------------------------------------------


def block(report: Report) -> str:
    """What to paste into an issue, fenced."""
    told = {field.name: _publishable(getattr(report, field.name)) for field in fields(report)}
    report = Report(**told)
    results: list[Result] = report.results
    count = {status: sum(r.status == status for r in results) for status in ("passed", "failed", "left out")}
    counts = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    installed = [f"{name} {known}" for name, known in report.versions.items() if known]
    absent = [name for name, known in report.versions.items() if known is None]
    lines = [
        f"dc_trl doctor: {counts}; {report.seconds / 60:.1f} of {report.minutes:g} minutes",
        f"system     {report.system}",
        f"packages   {', '.join(installed)}",
        *([f"absent     {', '.join(absent)}"] if absent else []),
        *(f"variable   {name}={value}" for name, value in report.variables.items()),
        *machine_lines(results),
        f"model      {report.model}",
        "",
        *table(["check", "result", "s", "found"], [line for result in results for line in rows(result)]),
        "",
        *left_out_lines(results),
        f"never tried here: {_NOT_TRIED}",
    ]
    if count["failed"]:
        lines.append(f"tracebacks and the servers' output: {report.log} (look through it before you attach it)")
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])


def machine_lines(results: Sequence[Result]) -> list[str]:
    """What the check of the devices has found."""
    found = next((result.found for result in results if result.name == "device"), {})
    lines = []
    if "cpu" in found:
        shared = f", /dev/shm {found['shared_memory_gb']:.1f} GB" if "shared_memory_gb" in found else ""
        memory = f"{found['cores']} cores, {found['memory_gb']:.1f} GB{shared}"
        lines.append(f"processor  {found['cpu']}; {memory}; load {found['load']:.1f}")
    if "build" in found:
        driver = f", NVIDIA driver {found['driver']}" if "driver" in found else ""
        lines.append(f"PyTorch    {found['build']}{driver}; computes on {found.get('device', 'nothing')}")
    lines += [f"GPU {number}      {name}" for number, name in enumerate(found.get("devices", []))]
    if len(found.get("devices", [])) > 1:
        lines.append("           every check after `device` sees one of them alone")
    if "devices" in found and not found["devices"]:
        lines.append("GPU        none that PyTorch can use")
    if "note" in found:
        lines.append(f"note       {found['note']}")
    return lines


def left_out_lines(results: Sequence[Result]) -> list[str]:
    """What was left out, by reason."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.status == "left out":
            names.setdefault(result.reason, []).append(result.name)
    return [f"left out: {', '.join(of)}: {reason}"[: _REASON + 60] for reason, of in names.items()]


def progress(result: Result) -> str:
    """A line while the checks run."""
    took = f" in {result.seconds:.1f} s" if result.seconds else ""
    return f"{result.name}: {result.status}{took}: {'; '.join([*filter(None, [result.reason]), *summary(result)])}"


def rows(result: Result) -> list[list[str]]:
    """Lines of the table, one for each thing that was found. What was left out is explained below it."""
    found = summary(result)
    if result.status == "failed":
        found.insert(0, result.reason if len(result.reason) <= _REASON else result.reason[: _REASON - 1] + "…")
    first = [result.name, result.status, f"{result.seconds:.1f}" if result.seconds else ""]
    return [[*(first if number == 0 else [""] * 3), line] for number, line in enumerate(found or [""])]


def table(head: list[str], lines: Sequence[list[str]]) -> list[str]:
    """Columns as wide as what is in them; the last one is left as it is."""
    lines = [head, *lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return [
        "  ".join([*(line[column].ljust(width) for column, width in enumerate(widths)), line[-1]]) for line in lines
    ]


def summary(result: Result) -> list[str]:
    """What a check has found, in words, as far as it came."""
    found = result.found
    words: list[str] = []
    if "device" in found:
        words.append(f"computes on {found['device']}")
    if "relative_error" in found:
        words.append(f"off by {found['relative_error']:.1e} from float64")
    if "architecture" in found:
        words.append(
            f"{found['architecture']}, {found['parameters'] / 1e6:,.1f} M parameters, hidden size "
            f"{found['hidden_size']}, widths are multiples of {found['multiple_of']}"
        )
    if "start_seconds" in found:
        words.append(f"up after {found['start_seconds']:.0f} s")
    if "format" in found:
        words.append(", ".join([found["format"], *found["kernels"]]))
    if "discrepancy" in found:
        low, high = found["interval"]
        words.append(f"δ̄ {found['discrepancy']:.2e} [{low:.1e}, {high:.1e}], k3 {found['k3']:.1e}")
        words.append(f"{found['tokens']} tokens in {found['sampling_seconds']:.2f} s")
    if "sync_seconds" in found:
        words.append(f"new weights in {found['sync_seconds']:.4f} s")
    if "reload_seconds" in found:
        words.append(
            f"new weights written in {found['write_seconds']:.3f} s, reloaded in {found['reload_seconds']:.3f} s"
        )
    if "after_reload" in found:
        words.append(f"then δ̄ {found['after_reload']:.1e} to them, {found['to_old_weights']:.1e} to the old ones")
    if "ratio" in found:
        low, high = found["interval_of_turns"]
        noise = "no difference shown" if low <= 1 <= high else "they differ"
        words.append(
            f"with the constraint × {found['ratio']:.3f} (95 % interval of {found['turns']} turns: {low:.3f} to "
            f"{high:.3f}, {noise}); {found['step_seconds']:.3f} s without"
        )
    return words
