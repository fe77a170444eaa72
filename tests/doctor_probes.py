"""Probes that do not end as they should, for the doctor's real child processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def passes(setup, scheme):
    yield {"architecture": f"process {os.getpid()}", "parameters": 0, "hidden_size": 0, "multiple_of": 1}


def two_gpus(setup, scheme):
    yield {"devices": ["one", "two"], "device": "cuda:1"}


def sees(setup, scheme):
    yield {"device": f"{setup.device} of {os.environ.get('CUDA_VISIBLE_DEVICES')}"}


def raises(setup, scheme):
    yield {"start_seconds": 7.0}
    raise LookupError("no kernel\nfor this, key=abcdefgh12345678")


def is_killed(setup, scheme):
    yield {"start_seconds": 8.0}
    os.kill(os.getpid(), signal.SIGKILL)


def exits(setup, scheme):
    yield {}
    os._exit(3)


def hangs(setup, scheme):
    """With a child in a session of its own, as vLLM's servers are."""
    sleep = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    Path(setup.model).write_text(f"{os.getpid()} {child.pid}")
    yield {"start_seconds": 9.0}
    time.sleep(600)


def hangs_deaf(setup, scheme):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield from hangs(setup, scheme)
