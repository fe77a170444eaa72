"""The doctor's findings as text, fit to be published: without names of users and hosts, home folders and secrets."""

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..records.machine import installed_version
from ..settings.secrets import HIDDEN, is_secret_name, without_secrets
from .run import Result


_PACKAGES = ("dc_trl", "torch", "transformers", "trl", "vllm", "accelerate", "peft", "compressed-tensors", "datasets")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_ATTENTION_BACKEND")
_REASON = 300  # characters


def facts() -> dict[str, str]:
    """Return versions, the system without its name, and the variables of the environment that change results."""
    packages = ", ".join(f"{name} {installed_version(name) or '(absent)'}" for name in _PACKAGES)
    system = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    return {"system": system, "packages": packages} | {
        name: os.environ[name] for name in _VARIABLES if name in os.environ
    }


def publishable(text: str) -> str:
    """Return a text in one line, without secrets, home folders, and the names of this user and this machine."""
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
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path(home).name} - {"root"}
    host = socket.gethostname()
    hosts = {host, host.partition(".")[0]} - {"localhost"}
    for names, shown in ((users, "<user>"), (hosts, "<host>")):
        for name in sorted((each for each in names if len(each) > 1), key=len, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
    return " ".join(text.replace("```", "'''").split())


def summary(result: Result) -> str:
    """Return in one publishable line why a check did not pass, and what it found."""
    reason, found = publishable(result.reason), (f"{name} {value}" for name, value in result.found.items())
    short = reason if len(reason) <= _REASON else reason[: _REASON - 1] + "…"
    return "; ".join(filter(None, [short, publishable("; ".join(found))]))


def bottom_line(results: Sequence[Result]) -> str:
    """Return one line that says in which schemes this machine trains, and what failed."""
    parts = []
    for kind, words in (("step", "the replica"), ("server", "a vLLM server")):
        schemes = [r.name.partition(":")[2] for r in results if r.name.startswith(f"{kind}:") and r.status == "passed"]
        parts.append(f"trains with {words} in {', '.join(schemes) or 'no scheme'}")
    failed = ", ".join(result.name for result in results if result.status == "failed")
    return "bottom line: " + "; ".join(parts) + f"; failed: {failed or 'nothing'}"


def block(results: Sequence[Result], known: Mapping[str, str], log: str) -> str:
    """Return what to paste into an issue, fenced; `known` are facts by name, `log` has the tracebacks."""
    rows = [["check", "result", "s", "found"]]
    rows += [[result.name, result.status, f"{result.seconds:.1f}", summary(result)] for result in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    lines = [f"{name}: {publishable(value)}" for name, value in known.items() if value]
    lines += ["", *table, "", bottom_line(results)]
    if any(result.status == "failed" for result in results):
        lines.append(f"log: {publishable(log)} (look through it before you attach it)")
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])
