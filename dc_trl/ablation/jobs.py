"""Runs the jobs of a sweep, several at a time, and goes on where a killed sweep stopped."""

import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..files import lock_folder, open_in_place, read_object, write_text
from ..records.runs import SUMMARY_FILE
from ..resuming.checkpoints import TRAINER_STATE_FILE, checkpoint_defect, checkpoints
from ..serving import watchdog
from .plan import CONFIG_FILE, Job, Sweep, differing_settings


LOG_FILE = "train.log"
_GRACE = 45.0  # seconds that a job has to end by itself; one with a vLLM server needs 20 of them for that
_POLL = 0.2  # seconds
_LAST_LINES = 12  # of a failed job's log


def last_checkpoint(folder: Path) -> Path | None:
    """The latest whole checkpoint from which steps are left; None where there is none.

    A job killed after its last step is not resumed but started again.
    """
    for checkpoint in checkpoints(folder):
        if checkpoint_defect(checkpoint) is None:  # a job that was killed while it saved leaves part of one
            state = read_object(checkpoint / TRAINER_STATE_FILE)
            if state["global_step"] < state["max_steps"]:
                return checkpoint
    return None


def is_done(job: Job) -> bool:
    """Whether the job's run has ended well: the training script writes its summary last."""
    return (job.folder / SUMMARY_FILE).is_file()


def status(job: Job) -> str:
    """What running the job would do: "done", "resume from checkpoint-…", "start again" or "start"."""
    if is_done(job):
        return "done"
    if (checkpoint := last_checkpoint(job.folder)) is not None:
        return f"resume from {checkpoint.name}"
    return "start again" if _remains(job) else "start"


def require_own_folders(jobs: Sequence[Job]) -> None:
    """Refuses folders that hold something else than these jobs' runs.

    Raises:
        ValueError: names the folder, what differs, and the remedy.
    """
    for job in jobs:
        if changes := differing_settings(job):
            raise ValueError(
                f"{job.folder} holds a run with other settings ({'; '.join(changes)}): choose another --output, or "
                "move that folder away."
            )
        if _remains(job) and not (job.folder / CONFIG_FILE).exists():
            raise ValueError(
                f"{job.folder} holds files that are not of a sweep (no {CONFIG_FILE}): choose another --output, or "
                "move that folder away."
            )


def _remains(job: Job) -> bool:
    """Whether an earlier attempt left something behind."""
    own = {CONFIG_FILE, LOG_FILE}
    return job.folder.is_dir() and any(path.name not in own for path in job.folder.iterdir())


def _set_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.unfinished-{number}")).exists():
        number += 1
    return folder.rename(aside)


class OutputLock:
    """Keeps two sweeps out of one output directory. The jobs hold it too, so that it outlives a killed sweep.

    Args:
        output: directory of the sweep; made if it is not there.
        report: takes a line when there is something to wait for.

    Raises:
        ValueError: it is still in use after the time that the jobs of a killed sweep take to end.
    """

    def __init__(self, output: Path, report: Callable[[str], None]):
        output.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _GRACE + 5
        waiting = False
        while True:
            try:
                self.descriptor = lock_folder(output)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"output={str(output)!r} is in use by another sweep: let it end, or choose another --output."
                    ) from None
            if not waiting:
                report(f"{output} is in use by another sweep, or by jobs of one that are ending: waiting")
                waiting = True
            time.sleep(_POLL)

    def __enter__(self) -> "OutputLock":
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.descriptor)


@dataclass
class Failure:
    """A job that ended without a summary: its exit code, and the last lines of its log."""

    job: Job
    code: int
    last_lines: list[str]

    def __str__(self) -> str:
        lines = [f"\n{self.job.name} failed with exit code {self.code}:", *(f"    {line}" for line in self.last_lines)]
        return "\n".join(lines)


class _Attempt:
    """One process of a job. It ends with this process, whether that exits, is interrupted or is killed."""

    def __init__(self, job: Job, command: Sequence[str], slot: Mapping[str, str], lock: OutputLock):
        self.job, self.slot = job, slot
        checkpoint = last_checkpoint(job.folder)
        self.note = f"resumed from {checkpoint.name}" if checkpoint else "started"
        if checkpoint is None and _remains(job):
            self.note = f"started again; what was there is now {_set_aside(job.folder)}"
        job.folder.mkdir(parents=True, exist_ok=True)
        write_text(job.folder / CONFIG_FILE, yaml.safe_dump(job.settings, sort_keys=False, allow_unicode=True))
        command = [*command, "--config", str(job.folder / CONFIG_FILE)]
        if checkpoint is not None:
            command += ["--resume_from_checkpoint", str(checkpoint)]
        self.begin = time.monotonic()
        with open_in_place(job.folder / LOG_FILE, os.O_WRONLY | os.O_APPEND) as log:
            self._log_begin = log.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                [sys.executable, watchdog.__file__, str(_GRACE), *command],
                env=os.environ | dict(slot),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the sweep
                pass_fds=[lock.descriptor],
            )

    def result(self, ended: str) -> str:
        """How the attempt ended and after how long, for the report."""
        seconds = f"after {time.monotonic() - self.begin:.0f} s ({ended})"
        done = is_done(self.job)
        return f"done {seconds}" if done else f"FAILED {seconds}, log: {self.job.folder / LOG_FILE}"

    def failure(self) -> Failure:
        log = (self.job.folder / LOG_FILE).read_bytes()[self._log_begin :].decode(errors="replace")
        lines = [line for line in log.splitlines() if line.strip()]
        return Failure(self.job, self.process.returncode, lines[-_LAST_LINES:])


def run_jobs(
    jobs: Sequence[Job],
    command: Sequence[str],
    slots: Sequence[Mapping[str, str]],
    lock: OutputLock,
    report: Callable[[str], None] = print,
) -> list[Failure]:
    """Runs the jobs that are not done yet. A job that fails does not stop the others.

    Args:
        jobs: of the sweep; `require_own_folders` has accepted them.
        command: the training script and what launches it; `--config FILE` is appended.
        slots: environment variables of the jobs that run at the same time, a mapping for each.
        lock: of the output directory.
        report: takes a line for each job that starts or ends.

    Returns:
        What failed.
    """
    waiting = deque(job for job in jobs if not is_done(job))
    if len(waiting) < len(jobs):
        report(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are done already")
    free, running, failures = list(slots), list[_Attempt](), list[Failure]()
    try:
        while waiting or running:
            while waiting and free:
                attempt = _Attempt(waiting.popleft(), command, free.pop(0), lock)
                running.append(attempt)
                report(f"{attempt.job.name} {attempt.note}")
            for attempt in [attempt for attempt in running if attempt.process.poll() is not None]:
                running.remove(attempt)
                free.append(attempt.slot)
                ended = len(jobs) - len(waiting) - len(running)
                report(f"{attempt.job.name} {attempt.result(f'{ended} of {len(jobs)}')}")
                if not is_done(attempt.job):
                    failures.append(attempt.failure())
            time.sleep(_POLL)
    finally:
        if running:
            report(f"ending {len(running)} running job(s); the same command goes on with them")
        for attempt in running:
            assert attempt.process.stdin is not None
            attempt.process.stdin.close()  # which the watchdog takes for the end
        for attempt in running:
            attempt.process.wait()
    return failures


def require_trainable(sweep: Sweep, command: Sequence[str], slots: Sequence[Mapping[str, str]]) -> None:
    """Refuses settings that training would refuse, before the first job starts.

    Args:
        sweep: all its variants are checked.
        command: the words of a command that takes a YAML file of variants (name → settings) as its last word. It is
            started as the jobs will be, and ends with a line `error: …` and another exit code than 0 where it refuses
            one of them.
        slots: as for `run_jobs`.

    Raises:
        ValueError: names the variant, the field, its value and the remedy; or the command that is not there.
    """
    with tempfile.TemporaryDirectory(prefix="dc_trl-ablate-") as folder:
        file = Path(folder, "variants.yaml")
        own = {"output_dir": folder, "seed": sweep.seeds[0]}
        write_text(file, yaml.safe_dump({v.name: sweep.settings(v) | own for v in sweep.variants}))
        environment = os.environ | dict(slots[0])
        try:
            done = subprocess.run([*command, str(file)], env=environment, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ValueError(
                f"launch={command[0]!r} is no command: activate its environment, or give its path."
            ) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise ValueError(errors[0].removeprefix("error: ") if errors else done.stderr.strip()[-3000:])
