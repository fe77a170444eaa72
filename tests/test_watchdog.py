"""The watchdog of a server: what it ends and removes when the server, or the process that asked for it, is killed."""

import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from dc_trl.serving import watchdog

from .vllm_server import shared_memory, wait_until_gone


# Makes shared memory in a child, as an engine does, and waits.
SERVER = """
import subprocess, sys, time
from multiprocessing import shared_memory, get_context

def engine():
    global memory
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    time.sleep(600)

if __name__ == "__main__":
    from multiprocessing import resource_tracker
    resource_tracker.ensure_running()
    child = get_context("fork").Process(target=engine)
    child.start()
    child.join()
    sys.exit(3)
"""
# Asks the watchdog for that server and waits.
PARENT = """
import subprocess, sys, time
subprocess.Popen(
    [sys.executable, sys.argv[1], "--folder", sys.argv[2], "1", sys.executable, "-c", sys.argv[3]],
    stdin=subprocess.PIPE,
).wait()
time.sleep(600)
"""


@pytest.fixture
def family(tmp_path):
    """A process that asks for a server, and what the watchdog started for it; and their folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-c", PARENT, watchdog.__file__, str(folder), SERVER]
    parent = psutil.Popen(command)
    try:
        end = time.monotonic() + 60
        while not shared_memory(parent.children(recursive=True)):
            assert time.monotonic() < end
            assert parent.poll() is None
            time.sleep(0.05)
        yield parent, parent.children(recursive=True), folder
    finally:
        parent.kill()
        parent.wait()


def test_what_a_killed_engine_leaves_in_shared_memory_is_removed(family):
    _, processes, folder = family
    left = shared_memory(processes)
    assert all(path.exists() for path in left)
    (engine,) = [process for process in processes if shared_memory([process])]
    engine.kill()
    wait_until_gone(processes)
    assert not any(path.exists() for path in left)
    assert folder.is_dir()  # the parent's to remove, which lives on


def test_what_a_killed_server_leaves_in_shared_memory_is_removed(family):
    _, processes, _ = family
    left = shared_memory(processes)
    server = next(process for process in processes if process.cmdline()[1:] == ["-c", SERVER] and process.children())
    server.kill()
    wait_until_gone(processes)
    assert not any(path.exists() for path in left)


def test_the_folder_of_a_killed_parent_is_removed_once_the_server_is_gone(family):
    parent, processes, folder = family
    left = shared_memory(processes)
    parent.kill()
    wait_until_gone(processes)
    assert not any(path.exists() for path in left)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("code", "returned"),
    [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_the_exit_code_is_the_servers(code, returned):
    command = [sys.executable, watchdog.__file__, "1", sys.executable, "-c", code]
    assert subprocess.Popen(command, stdin=subprocess.PIPE).wait(60) == returned


def test_others_shared_memory_stays(family):
    """A segment that no process of the group made."""
    mine = SharedMemory(create=True, size=4096)
    try:
        parent, processes, _ = family
        parent.kill()
        wait_until_gone(processes)
        assert Path("/dev/shm", mine.name.lstrip("/")).exists()
    finally:
        mine.close()
        mine.unlink()
