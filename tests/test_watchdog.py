"""The watchdog of a server: what it ends and removes when the server, or the process that asked for it, is killed."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from dc_trl.serving import watchdog

from .vllm_server import alive, shared_memory, wait_until_gone


# Makes shared memory in a child, as an engine does, and a socket in the directory for temporary files, and waits.
SERVER = """
import socket, subprocess, sys, tempfile, time
from multiprocessing import shared_memory, get_context

def engine():
    global memory
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    time.sleep(600)

if __name__ == "__main__":
    socket.socket(socket.AF_UNIX).bind(tempfile.gettempdir() + "/socket")
    from multiprocessing import resource_tracker
    resource_tracker.ensure_running()
    child = get_context("fork").Process(target=engine)
    child.start()
    child.join()
    sys.exit(3)
"""
# Asks one watchdog for that server and another one for a folder, waits. A child that it forks holds the pipes open.
PARENT = """
import os, subprocess, sys, time
watchdogs = [
    subprocess.Popen([sys.executable, sys.argv[1], *arguments], stdin=subprocess.PIPE)
    for arguments in (["1", sys.executable, "-c", sys.argv[3]], ["--folder", sys.argv[2]])
]
if os.fork() == 0:
    time.sleep(600)
    os._exit(0)
watchdogs[0].wait()
time.sleep(600)
"""


@pytest.fixture
def family(tmp_path, short_tmp):
    """A process that asks for a server and a folder, what was started for them, and the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-c", PARENT, watchdog.__file__, str(folder), SERVER]
    parent = psutil.Popen(command, env=os.environ | {"TMPDIR": str(short_tmp)})
    forked: list[psutil.Process] = []
    try:
        end = time.monotonic() + 120
        while not (forked and shared_memory(parent.children(recursive=True))):
            assert time.monotonic() < end
            assert parent.poll() is None
            time.sleep(0.05)
            forked = [child for child in parent.children() if child.cmdline() == command]
        (server,) = [child for child in parent.children() if child.children()]
        yield parent, [server, *server.children(recursive=True)], folder
    finally:
        for process in [parent, *alive(forked)]:
            process.kill()
        parent.wait()


def test_what_a_killed_engine_leaves_is_removed(family, short_tmp):
    _, processes, folder = family
    left = shared_memory(processes)
    assert all(path.exists() for path in left)
    (own,) = short_tmp.iterdir()
    assert (own / "socket").is_socket()
    (engine,) = [process for process in processes if shared_memory([process])]
    engine.kill()
    wait_until_gone(processes)
    assert not any(path.exists() for path in left)
    assert not own.exists()
    assert folder.is_dir()  # of the parent, which lives on


def test_what_a_killed_server_leaves_is_removed_also_where_its_watchdog_is_to_end_with_it(family, short_tmp):
    """SLURM sends SIGTERM to all processes of a job."""
    _, processes, _ = family
    left = shared_memory(processes)
    processes[0].terminate()
    time.sleep(0.2)
    processes[1].kill()
    wait_until_gone(processes)
    assert not any(path.exists() for path in left)
    assert list(short_tmp.iterdir()) == []


def test_server_and_folder_of_a_killed_parent_are_gone_although_its_child_lives(family, short_tmp):
    parent, processes, folder = family
    left = shared_memory(processes)
    children = [child for child in parent.children() if child != processes[0]]
    assert len(children) == 2  # the watchdog of the folder, and the child
    parent.kill()
    wait_until_gone(processes)
    (child,) = alive(children)
    child.kill()
    assert not any(path.exists() for path in left)
    assert not folder.exists()
    assert list(short_tmp.iterdir()) == []


def test_sockets_have_room_in_a_directory_with_a_long_name(tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    code = "import socket, tempfile; socket.socket(socket.AF_UNIX).bind(tempfile.gettempdir() + '/' + 36 * 's')"
    command = [sys.executable, watchdog.__file__, "1", sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"TMPDIR": str(long)})
    assert process.wait(60) == 0


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
