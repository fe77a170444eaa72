"""Ends the server of a process that may be killed. Run as a file.

    python watchdog.py GRACE COMMAND [ARGUMENT ...]

Its standard input is a pipe that the starting process holds open. When that process writes to it, exits or is killed,
the command gets SIGTERM, and after GRACE seconds SIGKILL together with all processes of its group: a vLLM server that
is still starting hangs on SIGTERM, and a killed one leaves its engine behind. The exit code is the command's.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil


_TRACKER_SECONDS = 10.0  # time in which Python's resource tracker removes what the other processes left


def members(group: int) -> list[psutil.Process]:
    """Return the processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_group(group: int) -> None:
    """Kill all processes of a group, except the resource tracker, which ends once it has cleaned up after them."""
    end = time.monotonic() + _TRACKER_SECONDS
    while (left := members(group)) and time.monotonic() < end:
        for process in left:
            with suppress(psutil.Error):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with_parent(process: subprocess.Popen, parent: int, grace: float) -> None:
    """End a command once the starting process asks for that or has ended itself."""
    # The pipe alone is not enough: forked processes of the starting one hold it open too, and may outlive it.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1.0)[0]:
        pass
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    """Run the command until it ends or the starting process does, and end all that it started."""
    parent = os.getppid()
    # If all processes of a job are ended together, as SLURM does, the command ends too, and this process cleans up.
    # The signals get a handler, because the command would inherit it if they were ignored.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_parent, args=(process, parent, float(sys.argv[1])), daemon=True).start()
    code = process.wait()
    end_group(process.pid)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
