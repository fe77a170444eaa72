"""Grading in worker processes, each answer within limits of time and memory.

Not by a library: multiprocessing, and with it pebble, starts workers that import the user's script again (and PyTorch,
which is larger than the limit of memory).

A worker reads one line of JSON ([answer, fields of the gold]) and writes one ([correct, answer], or a string: the
exception that grading raised); first a line that says it is ready. It ends when its input is closed. It dies of what
an answer does to it: out of memory, or SIGALRM after its seconds.
"""

import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from .answers import Gold, Verdict, try_to_grade
from .text import MAX_ANSWER, extract_answer, squash


logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = 3  # exit code of a worker
_WORK = "from dc_trl.grading.pool import work; work()"  # what its process runs

_Job = tuple[str, Gold]


class _Worker:
    """One process, which grades one answer at a time, and which its own alarm or a hostile answer may end."""

    def __init__(self, time_limit: float, memory_limit: int):
        package_root = str(Path(__file__).resolve().parents[2])
        path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            # -P: a user's json.py in the working directory is not ours to import. One thread: there is a pool.
            [sys.executable, "-P", "-c", _WORK, str(memory_limit), str(time_limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for this process; its end is the worker's
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )
        if not self._ask():
            raise RuntimeError(
                f"a grading worker ended with code {self.process.wait()} before it was ready: see its error above, "
                f"check that {sys.executable} can import math_verify, and raise memory_limit if it ran out."
            )

    def grade(self, job: _Job) -> Verdict | str:
        """Return the verdict on an answer, or why there is none; the worker has ended if it was late or crashed."""
        if line := self._ask(json.dumps([job[0], astuple(job[1])]) + "\n"):
            reply = json.loads(line)
            return reply if isinstance(reply, str) else Verdict(*reply)
        return {-signal.SIGALRM: "time", _OUT_OF_MEMORY: "memory"}.get(self.process.wait(), "crash")

    def _ask(self, question: str = "") -> str:
        """Write a question, and return the line that answers it; "" where the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(question)
            self.process.stdin.flush()
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()


class Grader:
    """Grades completions in worker processes: in parallel, and no answer costs more than its limits.

    Workers start with the first answers and end with [`close`], with the `with` block, or with this process, however
    it ends. After a fork the child gets workers of its own.

    Args:
        processes: number of workers, at least 1; None: as many as there are cores, at most 8.
        time_limit: seconds of wall-clock time for one answer, above 0. What takes longer is wrong.
        memory_limit: bytes of address space for one worker, at least 256 MiB (Linux; elsewhere there is no limit).
            What needs more is wrong.

    Attributes:
        failures: how many answers were wrong because of `"time"`, `"memory"`, a `"crash"` of the worker, or an
            `"error"`: an exception in grading. Of equal answers to one gold, which are graded once, one counts. The
            first of each kind is a warning.
    """

    def __init__(self, processes: int | None = None, time_limit: float = 5.0, memory_limit: int = 1 << 30):
        self.processes = processes or min(8, os.cpu_count() or 1)
        self.time_limit = time_limit
        self.memory_limit = memory_limit
        self.failures: Counter[str] = Counter()
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._owner = os.getpid()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. Grading again starts new ones."""
        while not self._idle.empty():
            self._idle.get().close()

    def grade(self, completions: Sequence[str], golds: Sequence[Gold]) -> list[Verdict]:
        """Verdicts in the order of the completions. Equal answers to the same gold are graded once.

        Raises:
            ValueError: there are not as many golds as completions.
            RuntimeError: a worker cannot start.
        """
        if self._owner != os.getpid():  # in a forked child: the workers are the parent's
            self._owner, self._idle = os.getpid(), queue.LifoQueue()
        answers = [extract_answer(completion) for completion in completions]
        # No box is wrong as an empty box is, but only a worker can tell whether the gold can be graded.
        jobs = [((answer or "")[: MAX_ANSWER + 1], gold) for answer, gold in zip(answers, golds, strict=True)]
        with ThreadPoolExecutor(self.processes, "dc_trl-grading") as threads:
            # After an error or Ctrl-C, what is in hand ends within its limit of time, and the rest is cancelled.
            once = list(dict.fromkeys(jobs))
            verdicts = dict(zip(once, threads.map(self._grade, once), strict=True))
        return [
            verdicts[job] if answer is not None else Verdict(verdicts[job].correct, None)
            for job, answer in zip(jobs, answers, strict=True)
        ]

    def _grade(self, job: _Job) -> Verdict:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self.time_limit, self.memory_limit)
        reply = worker.grade(job)
        if worker.process.returncode is None:
            self._idle.put(worker)
        else:
            worker.close()
        if isinstance(reply, Verdict):
            return reply
        kind = reply if reply in ("time", "memory", "crash") else "error"  # for which the answer is wrong
        self.failures[kind] += 1
        level = logging.WARNING if self.failures[kind] == 1 else logging.DEBUG
        message = "Grading %.80r against %.80r failed (%s). The answer counts as wrong, and in `Grader.failures`."
        logger.log(level, message, job[0], job[1].answer, reply)
        return Verdict(False, squash(job[0]), kind)


def work() -> None:
    """Grade what the standard input brings; the arguments are the limits of memory, bytes, and of time, seconds."""
    memory_limit, seconds = int(sys.argv[1]), float(sys.argv[2])
    # What libraries print must not be read as verdicts, and what a hostile answer makes them print helps nobody.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    # A job system signals all processes of a run, which finishes its step, and would read right answers as wrong.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    # Whoever started us may have had the alarm ignored or blocked, and nothing else ends a late answer.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    if sys.platform == "linux":  # elsewhere the address space cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    try_to_grade("\\sqrt{3}", Gold("\\frac{3}{\\sqrt{3}}"))  # the parser builds its tables once
    os.dup2(silence, sys.stderr.fileno())
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        answer, fields = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            reply = json.dumps(try_to_grade(answer, Gold(*fields)))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies, flush=True)
