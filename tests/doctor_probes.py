"""Checks that do not end as they should, for the doctor's real child processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def passes(setup, scheme):
    yield {"process": os.getpid()}


def raises(setup, scheme):
    tempfile.mkdtemp()  # nobody here removes it
    yield {"litter": "made"}
    raise LookupError("no kernel\nfor this, key=abcdefgh12345678")


def is_killed(setup, scheme):
    yield {"start": 8.0}
    os.kill(os.getpid(), signal.SIGKILL)


def exits(setup, scheme):
    yield {}
    os._exit(3)


def hangs(setup, scheme):
    """With a child in a session of its own, as vLLM's servers are."""
    sleep = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    Path(setup.model).write_text(f"{os.getpid()} {child.pid}")
    yield {"start": 9.0}
    time.sleep(600)


def hangs_deaf(setup, scheme):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield from hangs(setup, scheme)
