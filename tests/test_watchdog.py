"""The watchdog of a server: what it ends and removes when the server, or the process that asked for it, is killed."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from dc_trl.serving import watchdog

from .vllm_server import alive, shared_memory, wait_until_gone


# Makes shared memory in a child, as an engine does, and waits.
SERVER = """
import sys, time
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
# Asks a watchdog for that server, and waits. A child that it forks holds the pipe open.
PARENT = """
import os, subprocess, sys, time
command = [sys.executable, sys.argv[1], "1", sys.executable, "-c", sys.argv[2]]
watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
if os.fork() == 0:
    time.sleep(600)
    os._exit(0)
watchdog.wait()
time.sleep(600)
"""


@pytest.fixture
def family():
    """A process that asks for a server, and what was started for it."""
    command = [sys.executable, "-c", PARENT, watchdog.__file__, SERVER]
    parent = psutil.Popen(command)
    forked: list[psutil.Process] = []
    try:
        end = time.monotonic() + 120
        while not (forked and shared_memory(parent.children(recursive=True))):
            assert time.monotonic() < end
            assert parent.poll() is None
            time.sleep(0.05)
            forked = [child for child in parent.children() if child.cmdline() == command]
        (server,) = [child for child in parent.children() if child.children()]
        yield parent, [server, *server.children(recursive=True)]
    finally:
        for process in [parent, *alive(forked)]:
            process.kill()
        parent.wait()


def test_what_a_killed_engine_leaves_is_removed(family):
    _, processes = family
    left = shared_memory(processes)
    assert all(path.exists() for path in left)
    (engine,) = [process for process in processes if shared_memory([process])]
    engine.kill()
    wait_until_gone(processes)
    assert not any(path.exists() for path in left)


def test_the_server_of_a_killed_parent_is_gone_although_its_child_lives(family):
    parent, processes = family
    left = shared_memory(processes)
    children = [child for child in parent.children() if child != processes[0]]
    parent.kill()
    wait_until_gone(processes)
    (child,) = alive(children)
    child.kill()
    assert not any(path.exists() for path in left)


def test_the_exit_code_is_the_servers():
    for code, returned in (
        ("raise SystemExit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ):
        command = [sys.executable, watchdog.__file__, "1", sys.executable, "-c", code]
        assert subprocess.Popen(command, stdin=subprocess.PIPE).wait(60) == returned
