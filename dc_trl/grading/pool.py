"""Grading in worker processes, each answer within limits of time and memory.

Each worker has a thread that hands it one answer after another and kills it when an answer is late. Not by a library:
multiprocessing, and with it pebble, starts workers that import the user's script again (and PyTorch, which is larger
than the limit of memory), leaves semaphores for a forked child to lose, and lets a forked child that exits end the
parent's workers; pebble's pool also breaks when an idle worker dies, and never calls a worker late that has not said
that it began.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import astuple
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from .answers import Gold, Verdict
from .text import MAX_ANSWER, extract_answer, squash


logger = logging.getLogger(__name__)

_LEAST_MEMORY = 256 << 20  # bytes; a worker starts with about 60 MiB
_TOGETHER = 4  # answers that go to one worker: those to one gold, which it parses once
_STARTUP_LIMIT = 300.0  # seconds until a worker is ready, on a machine that is busy
_SHOWN = 80  # characters of an answer in the log
OUT_OF_MEMORY = 3  # exit code of a worker

_Job = tuple[str, Gold]


class _Failure(NamedTuple):
    """Why there is no verdict: a key of `Grader.failures`, and for an exception in grading what it says."""

    reason: str
    error: str = ""


class _Worker:
    """One process, which grades one answer at a time."""

    def __init__(self, time_limit: float, memory_limit: int):
        package_root = str(Path(__file__).resolve().parents[2])
        path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            # -P: a user's json.py in the working directory is not ours to import. One thread: there is a pool.
            [sys.executable, "-P", "-m", "dc_trl.grading.worker", str(memory_limit), str(2 * time_limit + 1)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for this process; its end is the worker's
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._time_limit, self._memory_limit = time_limit, memory_limit
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Raise a RuntimeError if the process does not start."""
        if self._is_ready:
            return
        try:
            self._read_line(_STARTUP_LIMIT)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise RuntimeError(
                f"a grading worker ended with code {self.process.returncode} before it was ready: see its error "
                f"above, check that {sys.executable} can import math_verify, and raise "
                f"memory_limit={self._memory_limit} if it ran out."
            ) from error
        self._is_ready = True

    def grade(self, job: _Job) -> Verdict | _Failure:
        """Return the verdict on an answer. If time or memory runs out, or the worker crashes, the worker ends."""
        self.wait_until_ready()
        with suppress(BrokenPipeError):  # it has ended, as reading will tell
            self._stdin.write(json.dumps([job[0], astuple(job[1])]).encode() + b"\n")
        try:
            reply = json.loads(self._read_line(self._time_limit))
        except TimeoutError:
            self.close()
            return _Failure("time")
        except EOFError:
            self.close()
            return _Failure("memory" if self.process.returncode == OUT_OF_MEMORY else "crash")
        return _Failure("error", reply) if isinstance(reply, str) else Verdict(*reply)

    def _read_line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not wait([self._stdout.fileno()], max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            if not (data := self._stdout.read(65536)):
                self.process.wait()
                raise EOFError
            line += data
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        self._stdin.close()
        self._stdout.close()


class _StoppedError(Exception):
    """Grading was given up."""


class Grader:
    """Grades completions in worker processes: in parallel, and no answer costs more than its limits.

    Workers start with the first answers and end with [`close`], with the `with` block, or with this process, however
    it ends. May be used from any thread, and after a fork, where the child gets workers of its own.

    Args:
        processes: number of workers, at least 1; None: as many as there are cores, at most 8.
        time_limit: seconds of wall-clock time for one answer, above 0. What takes longer is wrong.
        memory_limit: bytes of address space for one worker, at least 256 MiB (Linux; elsewhere there is no limit).
            What needs more is wrong.

    Attributes:
        failures: how many answers were wrong because of `"time"`, `"memory"`, a `"crash"` of the worker, or an
            `"error"`: an exception in grading. Of equal answers to one gold, which are graded once, one counts.
        errors: these exceptions, `"TypeError: …"`, and how often each was raised. The first of each is a warning.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, processes: int | None = None, time_limit: float = 5.0, memory_limit: int = 1 << 30):
        if processes is not None and processes < 1:
            raise ValueError(f"processes={processes} grade nothing: use at least 1, or None for one per core.")
        if not 0 < time_limit < 1e6:
            raise ValueError(f"time_limit={time_limit} is no limit: use a number of seconds above 0.")
        if memory_limit < _LEAST_MEMORY:
            raise ValueError(f"memory_limit={memory_limit} starts no worker: use at least {_LEAST_MEMORY} bytes.")
        self.processes = processes or min(8, os.cpu_count() or 1)
        self.time_limit = time_limit
        self.memory_limit = memory_limit
        self.failures: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._workers: dict[int, _Worker] = {}  # by the number of the thread that it serves
        self._lock = threading.Lock()  # of one call at a time
        self._changing = threading.Lock()  # of what `_workers` holds
        _graders.add(self)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers and wait until they are ready; `grade` starts them as it needs them.

        Raises:
            RuntimeError: a worker cannot start.
        """
        with self._lock:
            for worker in [self._worker(number, self._workers) for number in range(self.processes)]:
                worker.wait_until_ready()

    def close(self) -> None:
        """End the workers. Grading again starts new ones."""
        with self._lock:
            self._stop()

    def grade(self, completions: Sequence[str], golds: Sequence[Gold]) -> list[Verdict]:
        """Verdicts in the order of the completions. Equal answers to the same gold are graded once.

        Raises:
            ValueError: there are not as many golds as completions.
            RuntimeError: a worker cannot start.
        """
        if len(completions) != len(golds):
            raise ValueError(
                f"golds holds {len(golds)} answers for {len(completions)} completions: give one for each."
            )
        answers = [extract_answer(completion) for completion in completions]
        # No box is wrong as an empty box is, but only a worker can tell whether the gold can be graded.
        jobs = [((answer or "")[: MAX_ANSWER + 1], gold) for answer, gold in zip(answers, golds, strict=True)]
        # Answers to the same gold go out together: the worker that has parsed one parses the next in half the time.
        first = {gold: row for row, gold in reversed(list(enumerate(golds)))}
        with self._lock:
            replies = self._run(sorted(set(jobs), key=lambda job: (first[job[1]], job[0])))
            verdicts = {
                job: reply if isinstance(reply, Verdict) else self._count(job, reply) for job, reply in replies.items()
            }
        return [
            verdicts[job] if answer is not None else Verdict(verdicts[job].correct, None)
            for job, answer in zip(jobs, answers, strict=True)
        ]

    def _worker(self, number: int, workers: dict[int, _Worker]) -> _Worker:
        """Return the worker of a thread.

        Raises:
            _StoppedError: `_stop` has ended these workers, and no new one may take the place of one that it ended.
        """
        with self._changing:
            if workers is not self._workers:
                raise _StoppedError
            if number not in workers:
                workers[number] = _Worker(self.time_limit, self.memory_limit)
            return workers[number]

    def _stop(self) -> None:
        with self._changing:
            workers, self._workers = self._workers, {}
        for worker in list(workers.values()):  # its thread may take one out
            worker.close()

    def _run(self, jobs: Sequence[_Job]) -> dict[_Job, Verdict | _Failure]:
        waiting = deque(jobs[start : start + _TOGETHER] for start in range(0, len(jobs), _TOGETHER))
        replies: dict[_Job, Verdict | _Failure] = {}
        workers = self._workers

        def serve(number: int) -> None:
            while waiting:
                with suppress(IndexError):  # another thread took the last
                    for job in waiting.popleft():
                        worker = self._worker(number, workers)
                        replies[job] = worker.grade(job)
                        if worker.process.returncode is not None:
                            del workers[number]

        with ThreadPoolExecutor(self.processes, "dc_trl-grading") as threads:
            try:
                served = [threads.submit(serve, number) for number in range(min(self.processes, len(waiting)))]
                for done in as_completed(served):
                    done.result()
            except BaseException:
                waiting.clear()
                self._stop()  # what they have in hand would answer the next call
                raise
        return replies

    def _count(self, job: _Job, failure: _Failure) -> Verdict:
        """Return the verdict on an answer that could not be graded: wrong."""
        reason, error = failure
        answer, gold = job[0][:_SHOWN], job[1].answer[:_SHOWN]
        if reason != "error":
            logger.info("A grading worker ended (%s) at %r; the answer counts as wrong.", reason, answer)
        elif error not in self.errors:
            advice = "The answer counts as wrong; `Grader.errors` counts such answers."
            logger.warning("Grading %r against %r raised %s. %s", answer, gold, error, advice)
        self.failures[reason] += 1
        self.errors.update([error] if error else [])
        return Verdict(False, squash(job[0]))


_graders: weakref.WeakSet[Grader] = weakref.WeakSet()


def _forget_workers() -> None:
    """In a forked child: the workers are the parent's, and our copies of their pipes would keep them alive."""
    for grader in _graders:
        grader._lock, grader._changing = threading.Lock(), threading.Lock()
        for worker in grader._workers.values():
            worker.forget()
        grader._workers = {}


os.register_at_fork(after_in_child=_forget_workers)
