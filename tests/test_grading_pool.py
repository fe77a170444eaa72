"""No answer harms the run: limits, replaced workers, threads, forks, parents that die."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from dc_trl.grading import Gold, Grader, extract_answer
from dc_trl.grading.answers import try_to_grade

from .test_grading import ROOT, boxed


TIME_LIMIT = 1.0
GOLDS = [Gold("46"), Gold(r"\sqrt{3}"), Gold(r"\frac{x}{y}+2^{10}"), Gold(r"(1, \sqrt{2})"), Gold("1,3", True)]


@pytest.fixture(scope="module")
def grader():
    with Grader(processes=2, time_limit=TIME_LIMIT) as grader:
        yield grader


def workers():
    return set(psutil.Process().children())


HOSTILE = {
    "huge power": r"9^{9^{9^{9}}}",
    "megabytes of boxes": r"\boxed{" * 300_000 + "46" + "}" * 300_000,
    "surrogate": "46\ud800",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_costs_at_most_its_limit(grader, answer):
    start = time.monotonic()
    verdicts = grader.grade([boxed(answer)] * len(GOLDS), GOLDS)
    # Each gold may cost the limit once, and a worker that was killed has to start again, on a machine that is busy.
    assert time.monotonic() - start < len(GOLDS) * (TIME_LIMIT + 40)
    assert len(verdicts) == len(GOLDS)
    assert grader.grade([boxed("46")], GOLDS[:1])[0].correct


def test_same_verdicts_as_without_workers():
    answers = ["46", "40+6", r"\sqrt{3}", r"\frac{3}{\sqrt{3}}", "3, 1", r"(1,\sqrt2)", r"\text{x}", "", "1,3"] * 20
    golds = [gold for gold in GOLDS for _ in range(36)]
    texts = [*map(boxed, answers[:-1]), "no box"]
    with Grader(processes=2, time_limit=60.0) as grader:  # an expression takes long on a machine that is busy
        here = [try_to_grade(extract_answer(text), gold) for text, gold in zip(texts, golds, strict=True)]
        assert grader.grade(texts, golds) == here


def test_a_killed_worker_costs_one_answer_and_is_replaced():
    before = workers()
    with Grader(processes=1, time_limit=60.0) as grader:
        assert grader.grade([boxed("1")], [Gold("1")])[0].correct
        (worker,) = workers() - before
        worker.kill()
        texts = [boxed(str(number)) for number in range(20)]
        verdicts = grader.grade(texts, [Gold(str(number)) for number in range(20)])
        assert sum(verdict.correct for verdict in verdicts) >= 19
        assert grader.failures["crash"] <= 1
        assert len(workers() - before) == 1
    assert workers() == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_to_all_processes_of_a_run_makes_no_right_answer_wrong(name):
    """Slurm sends SIGUSR1 to each process of a job step, and the run still finishes its step."""
    before = workers()
    with Grader(processes=1, time_limit=60.0) as grader:
        assert grader.grade([boxed("1")], [Gold("1")])[0].correct
        (worker,) = workers() - before
        worker.send_signal(getattr(signal, name))
        assert grader.grade([boxed("2")], [Gold("2")])[0].correct
        assert workers() - before == {worker}
    assert workers() == before


SCRIPT = """
import os, sys
from dc_trl.grading.rewards import math_reward
texts = [r"\\boxed{\\sqrt{2}/2}", r"\\boxed{40+6}", "none"]
golds = [r"\\frac{1}{\\sqrt{2}}", "46", "1"]
print(math_reward(texts, golds), flush=True)
child = os.fork()
if child == 0:
    print(math_reward(texts, golds), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(math_reward(texts, golds), flush=True)
print("torch" in sys.modules, flush=True)
if sys.argv[1:] == ["wait"]:
    sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.long
def test_in_a_script_without_a_main_guard_before_and_after_a_fork(script):
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=script.parent)
    assert done.stdout.splitlines() == ["[1.0, 0.0, 0.0]"] * 3 + ["False"], done.stderr
    assert done.stderr == ""


def test_a_killed_parent_leaves_no_worker(script):
    command = [sys.executable, script, "wait"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        for _ in range(4):
            parent.stdout.readline()
        left = psutil.Process(parent.pid).children()
        assert left
        parent.kill()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
