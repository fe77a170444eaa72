"""Runs a command for as long as the process that asks for it lives. Standard library only, run as a file.

    python watchdog.py GRACE COMMAND [ARGUMENT ...]

Its standard input is a pipe that the asking process holds open and never writes to; the system closes it when that
process exits, is killed or closes it on purpose. The command then gets SIGTERM, and after GRACE seconds it and all
processes of its group get SIGKILL: a vLLM server that is still starting hangs on SIGTERM, and a killed one leaves its
engine behind. The exit code is the command's.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with_parent(process: subprocess.Popen, grace: float) -> None:
    # Until the pipe is closed; a buffered read would hold a lock that the interpreter wants when it exits.
    while os.read(sys.stdin.fileno(), 1):
        pass
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    kill_group(process.pid)


def main() -> None:
    process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_parent, args=(process, float(sys.argv[1])), daemon=True).start()
    code = process.wait()
    kill_group(process.pid)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
