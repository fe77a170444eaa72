"""What of the machine each job of a sweep gets: cores, GPUs, and the command that launches it."""

import os
import shlex
from collections.abc import Sequence

import torch

from ..records.started import usable_cores
from .plan import Sweep


def parse_launch(text: str) -> list[str]:
    """The words of `--launch`.

    Raises:
        ValueError: there are none, or a quote is left open.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"launch={text!r} is invalid ({error}): write it as on a command line.") from error
    if not words:
        raise ValueError(f"launch={text!r} is empty: write a command, or leave it out.")
    return words


def choose_slots(
    sweep: Sweep, threads: int = 1, jobs: int | None = None, devices: str | None = None, launch: str | None = None
) -> list[dict[str, str]]:
    """Environment variables of the jobs that run at the same time, a mapping for each.

    Args:
        sweep: tells whether its jobs may use GPUs.
        threads: of each job; `threads` times `jobs` may not exceed the cores.
        jobs: at a time. By default one for each device; without devices one with `launch`, which starts several
            processes, or else as many as the cores allow.
        devices: GPUs of each job, "0,1" or "0+1,2+3"; "0,0,0" has three jobs share one. By default all, one for each
            job; none where every job runs on the CPU, or `launch` gives them out.
        launch: what starts a job of several processes.

    Raises:
        ValueError: names the option, its value and what it may be.
    """
    cores = usable_cores()
    if not 1 <= threads <= cores:
        raise ValueError(f"threads={threads} is invalid with {cores} cores: use 1 to {cores}.")
    groups = _device_groups(sweep, devices, launch)
    most = cores // threads
    if jobs is None:
        jobs = min(most, len(groups)) if groups else 1 if launch else most
    if not 1 <= jobs <= most:
        raise ValueError(f"jobs={jobs} with threads={threads} is invalid with {cores} cores: use 1 to {most}.")
    if groups and jobs > len(groups):
        raise ValueError(f"jobs={jobs} is invalid with devices for {len(groups)}: use fewer, or name more devices.")
    common = {"OMP_NUM_THREADS": str(threads)}
    if not groups:
        return [common] * jobs
    return [common | {"CUDA_VISIBLE_DEVICES": group} for group in groups[:jobs]]


def _device_groups(sweep: Sweep, devices: str | None, launch: str | None) -> Sequence[str]:
    """GPUs as in CUDA_VISIBLE_DEVICES, a text for each job; empty where the jobs do not share them out."""
    if devices is not None:
        groups = [group.split("+") for group in devices.split(",")]
        if any(not all(group) or len(set(group)) < len(group) for group in groups):
            raise ValueError(f"devices={devices!r} is invalid: name GPUs as in 0,1 or 0+1,2+3, none twice in one job.")
        return [",".join(group) for group in groups]
    if launch or sweep.on_cpu:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
