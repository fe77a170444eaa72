"""Checks that do not end as they should, for the doctor's real child processes."""

import os
import signal
import tempfile
import time


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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield {"process": os.getpid()}
    time.sleep(600)
