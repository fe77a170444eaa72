"""Runs the jobs of the study, several at a time; they end with this process, however it ends."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from sweeps import Job

from dc_trl.files import lock_folder, write_text
from dc_trl.serving.guard import start_watchdog


CONFIG_FILE, LOG_FILE, SUMMARY_FILE = "config.yaml", "train.log", "summary.json"
ONE_RUN = Path(__file__).with_name("one_run.py")
GRACE = 45  # seconds that a job has to end by itself; one with a vLLM server needs 20 of them
POLL = 0.2  # seconds
LAST_LINES = 12  # of a failed job's log

Slot = Mapping[str, str]  # environment variables of one of the jobs that run at the same time


class Failure(NamedTuple):
    """A job that ended without a summary, and its exit code."""

    job: Job
    code: int

    def __str__(self) -> str:
        log = (self.job.folder / LOG_FILE).read_text(errors="replace").splitlines()
        lines = [f"    {line}" for line in log if line.strip()][-LAST_LINES:]
        return "\n".join([f"\n{self.job.name} failed with exit code {self.code}:", *lines])


class _Attempt(NamedTuple):
    job: Job
    slot: Slot
    process: "subprocess.Popen[bytes]"
    begin: float  # seconds, of the monotonic clock


def is_done(job: Job) -> bool:
    """Tell whether the job's run has ended well: training writes its summary last."""
    return (job.folder / SUMMARY_FILE).is_file()


def lock_output(output: Path) -> int:
    """Keep other studies out of an output directory; return the descriptor that holds the lock.

    Raises:
        ValueError: another study uses it, or jobs of a killed one that are still ending.
    """
    output.mkdir(parents=True, exist_ok=True)
    try:
        return lock_folder(output)
    except BlockingIOError:
        raise ValueError(
            f"output={str(output)!r} is in use by another study, or by jobs of one that are ending: wait {GRACE} s, "
            "or choose another --output."
        ) from None


def run_jobs(
    jobs: Sequence[Job], slots: Sequence[Slot], lock: int, ended: Callable[[Job], None], say: Callable[[str], None]
) -> list[Failure]:
    """Run the jobs; one that fails does not stop the others.

    Args:
        jobs: that are not done.
        slots: of the jobs that run at the same time.
        lock: descriptor of `lock_output`. The jobs hold it too, so that it outlives a killed study.
        ended: is called with each job that has ended well.
        say: takes a line for each job that starts or ends.

    Returns:
        What failed.
    """
    waiting, free, running, failures = deque(jobs), list(slots), list[_Attempt](), list[Failure]()
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(waiting.popleft(), free.pop(0), lock))
                say(f"{running[-1].job.name} started")
            for attempt in [attempt for attempt in running if attempt.process.poll() is not None]:
                running.remove(attempt)
                free.append(attempt.slot)
                job, seconds = attempt.job, time.monotonic() - attempt.begin
                left = len(waiting) + len(running)
                if is_done(job):
                    say(f"{job.name} done after {seconds:.0f} s, {left} left")
                    ended(job)
                else:
                    say(f"{job.name} FAILED after {seconds:.0f} s, {left} left; log: {job.folder / LOG_FILE}")
                    failures.append(Failure(job, attempt.process.returncode))
            time.sleep(POLL)
    finally:
        for attempt in running:
            assert attempt.process.stdin is not None
            attempt.process.stdin.close()  # which the watchdog takes for the end
        for attempt in running:
            attempt.process.wait()
    return failures


def _start(job: Job, slot: Slot, lock: int) -> _Attempt:
    """Start a job in a process that ends with this one; what an earlier attempt left is set aside."""
    if job.folder.exists():
        job.folder.rename(job.folder.with_name(f"{job.folder.name}.unfinished-{time.time_ns()}"))
    job.folder.mkdir(parents=True)
    config = job.folder / CONFIG_FILE
    write_text(config, yaml.safe_dump(job.settings, sort_keys=False, allow_unicode=True))
    command = [sys.executable, str(ONE_RUN), "--config", str(config)]
    with open(job.folder / LOG_FILE, "wb") as log:
        process = start_watchdog(
            str(GRACE),
            *command,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(slot),
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
        )
    return _Attempt(job, slot, process, time.monotonic())
