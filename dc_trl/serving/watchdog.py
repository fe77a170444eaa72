"""Runs a command for as long as the process that asks for it lives. Standard library only, run as a file.

    python watchdog.py [--folder FOLDER] GRACE COMMAND [ARGUMENT ...]

Its standard input is a pipe that the asking process holds open and never writes to; the system closes it
when that process exits, is killed or closes it on purpose. The command then gets SIGTERM, and after GRACE seconds it
and all processes of its group get SIGKILL: a vLLM server that is still starting hangs on SIGTERM, and a killed one
leaves its engine behind. FOLDER is what the asking process removes at its end; where that was killed, it is removed
here. The exit code is the command's.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


_TRACKER_SECONDS = 10.0  # that Python's resource tracker has to remove what the other processes left


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if entry.name.isdigit():
                # "pid (name) state parent group …", and the name may hold anything.
                state, _, of = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(of) == group and state not in "ZX":
                    found.append(int(entry.name))
    return found


def is_resource_tracker(pid: int) -> bool:
    """Whether this is the process that removes the shared memory of Python processes that were killed."""
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_group(group: int) -> None:
    """Kills all processes of a group, save the resource tracker: that one ends once it has cleaned up after them."""
    end = time.monotonic() + _TRACKER_SECONDS
    while (left := members(group)) and time.monotonic() < end:
        for pid in left:
            if not is_resource_tracker(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with_parent(process: subprocess.Popen, grace: float) -> None:
    # Until the pipe is closed; a buffered read would hold a lock that the interpreter wants when it exits.
    while os.read(sys.stdin.fileno(), 1):
        pass
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    parent = os.getppid()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("grace", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    process = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_parent, args=(process, args.grace), daemon=True).start()
    code = process.wait()
    end_group(process.pid)
    if args.folder is not None and os.getppid() != parent:
        shutil.rmtree(args.folder, ignore_errors=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
