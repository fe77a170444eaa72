"""One output directory, one run at a time."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import psutil

from dc_trl.files import LOCK_FILE, lock_output

from .helpers import ROOT, Rollouts, make_trainer, refuses


# Holds the lock, with a child of each kind that a run has: forked as a worker of a data loader, and started.
HOLDER = """
import os, subprocess, sys, time
from dc_trl.files import lock_output
with lock_output(sys.argv[1]):
    children = [subprocess.Popen(["sleep", "600"]).pid, os.fork()]
    if children[1] == 0:
        print(flush=True)
        time.sleep(600)
    print(*children, flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline(), process.stdout.readline()]
    children = [psutil.Process(int(pid)) for pid in " ".join(lines).split()]
    assert len(children) == 2
    try:
        yield process, children
    finally:
        for each in (process, *children):
            each.kill()
        process.wait()
        process.stdout.close()


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    run = tmp_path / "run"
    trainer = make_trainer(run, max_steps=1, rollout_func=Rollouts())
    with holder(run) as (process, children):
        held = f"process {process.pid} on {socket.gethostname()}"
        with refuses(ValueError, f"output_dir='{run}'", held, "another output_dir"):
            trainer.train()
        (tmp_path / "link").symlink_to(run)
        with refuses(ValueError, f"output_dir='{tmp_path / 'link'}'", held), lock_output(tmp_path / "link"):
            pass
        assert trainer.state.global_step == 0
        assert os.listdir(run) == [LOCK_FILE]

        process.send_signal(signal.SIGKILL)
        process.wait()
        assert all(child.is_running() for child in children)
        trainer.train()
        assert trainer.state.global_step == 1
        assert LOCK_FILE not in os.listdir(run)
        make_trainer(run, max_steps=1, rollout_func=Rollouts()).train()  # by the same process
        trainer.train()  # and the same trainer
