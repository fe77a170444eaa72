"""Grading in worker processes, each answer within limits of time and memory."""

import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from .answers import Gold, Verdict
from .text import MAX_ANSWER, extract_answer, squash


logger = logging.getLogger(__name__)

_LEAST_MEMORY = 256 << 20  # bytes; a worker starts with about 60 MiB
_AHEAD = 4  # answers a worker has in hand: it need not wait for us, and they fit into a pipe
_STARTUP_LIMIT = 300.0  # seconds until a worker is ready, on a machine that is busy
_SHOWN = 80  # characters of an answer in the log
OUT_OF_MEMORY = 3  # exit code of a worker

_Job = tuple[str, Gold]


class _Worker:
    """One process, and the answers it has in hand, first the one it works at."""

    def __init__(self, time_limit: float, memory_limit: int):
        package_root = str(Path(__file__).resolve().parents[2])
        path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            # -P: a user's json.py in the working directory is not ours to import. One thread: there is a pool.
            [sys.executable, "-P", "-m", "dc_trl.grading.worker", str(memory_limit), str(2 * time_limit + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for this process; its end is the worker's
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.time_limit = time_limit
        self.ready = False
        self.is_late = False
        self.deadline = time.monotonic() + _STARTUP_LIMIT
        self.jobs: deque[_Job] = deque()
        self.received = b""

    def send(self, job: _Job) -> None:
        """Hands a job over; an ended worker shows itself when its replies are read."""
        if not self.jobs:
            self.deadline = time.monotonic() + self.time_limit
        self.jobs.append(job)
        try:
            os.write(self.stdin, json.dumps([job[0], astuple(job[1])]).encode() + b"\n")
        except BrokenPipeError:
            self.process.wait()

    def receive(self) -> list[Verdict | str] | None:
        """Verdicts on its first jobs, in order, or what grading raised; None once it has ended."""
        data = os.read(self.stdout, 65536)
        if not data:
            return None
        *lines, self.received = (self.received + data).split(b"\n")
        if not self.ready and lines:
            self.ready = True
            lines = lines[1:]
        self.deadline = time.monotonic() + self.time_limit
        replies = map(json.loads, lines)
        return [reply if isinstance(reply, str) else Verdict(*reply) for reply in replies]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.forget()

    def forget(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


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
            `"error"`: an exception in grading.
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
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        _graders.add(self)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the workers and waits until they are ready; `grade` starts them as it needs them.

        Raises:
            RuntimeError: a worker cannot start.
        """
        with self._lock:
            while len(self._workers) < self.processes:
                self._workers.append(_Worker(self.time_limit, self.memory_limit))
            while starting := [worker for worker in self._workers if not worker.ready]:
                for worker in self._readable(starting):
                    if worker.receive() is None:
                        self._bury(worker, deque(), {})

    def close(self) -> None:
        """Ends the workers. Grading again starts new ones."""
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
            try:
                verdicts = self._run(sorted(set(jobs), key=lambda job: (first[job[1]], job[0])))
            except BaseException:
                self._stop()  # what they still have in hand would answer the next call
                raise
        return [
            verdicts[job] if answer is not None else Verdict(verdicts[job].correct, None)
            for job, answer in zip(jobs, answers, strict=True)
        ]

    def _stop(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _run(self, jobs: list[_Job]) -> dict[_Job, Verdict]:
        verdicts: dict[_Job, Verdict] = {}
        waiting = deque(jobs)
        while len(verdicts) < len(jobs):
            while len(self._workers) < min(self.processes, len(jobs) - len(verdicts)):
                self._workers.append(_Worker(self.time_limit, self.memory_limit))
            for worker in self._workers:
                while worker.ready and waiting and len(worker.jobs) < _AHEAD:
                    worker.send(waiting.popleft())
            busy = [worker for worker in self._workers if worker.jobs or not worker.ready]
            for worker in self._readable(busy):
                replies = worker.receive()
                if replies is None:
                    self._bury(worker, waiting, verdicts)
                    continue
                for reply in replies:
                    job = worker.jobs.popleft()
                    verdicts[job] = self._count_error(job, reply) if isinstance(reply, str) else reply
        return verdicts

    @staticmethod
    def _readable(workers: list[_Worker]) -> list[_Worker]:
        """Workers with something to read, which the end of a worker is too; those past their deadline are killed."""
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
            timeout = min(worker.deadline for worker in workers) - time.monotonic()
            events = selector.select(max(0.0, timeout))
        readable = [key.data for key, _ in events]
        for worker in workers:
            if worker not in readable and time.monotonic() >= worker.deadline:
                worker.process.kill()
                worker.is_late = True
                worker.deadline += _STARTUP_LIMIT  # its end is what there is to read next
        return readable

    def _count_error(self, job: _Job, error: str) -> Verdict:
        if error not in self.errors:
            logger.warning(
                "Grading %r against %r raised %s. The answer counts as wrong; `Grader.errors` counts such answers.",
                *(job[0][:_SHOWN], job[1].answer[:_SHOWN], error),
            )
        self.failures["error"] += 1
        self.errors[error] += 1
        return Verdict(False, squash(job[0]))

    def _bury(self, worker: _Worker, waiting: deque[_Job], verdicts: dict[_Job, Verdict]) -> None:
        code = worker.process.wait()
        self._workers.remove(worker)
        worker.forget()
        if not worker.ready:
            raise RuntimeError(
                f"a grading worker ended with code {code} before it was ready: see its error above, check that "
                f"{sys.executable} can import math_verify, and raise memory_limit={self.memory_limit} if it ran out."
            )
        reason = "time" if worker.is_late else "memory" if code == OUT_OF_MEMORY else "crash"
        job = worker.jobs.popleft()
        self.failures[reason] += 1
        logger.info("A grading worker ended (%s) at %r; the answer counts as wrong.", reason, job[0][:_SHOWN])
        verdicts[job] = Verdict(False, squash(job[0]))
        waiting.extendleft(reversed(worker.jobs))


_graders: weakref.WeakSet[Grader] = weakref.WeakSet()


def _forget_workers() -> None:
    """In a forked child: the workers are the parent's, and our copies of their pipes would keep them alive."""
    for grader in _graders:
        grader._lock = threading.Lock()
        for worker in grader._workers:
            worker.forget()
        grader._workers = []


os.register_at_fork(after_in_child=_forget_workers)
