"""A real vLLM server for tests: started as a user starts it, asked without our client."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from .helpers import DEFAULT_SIGINT, ROOT, TINY_MODEL


requires_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")


class Serve:
    """`dc-trl serve` in a process of its own, with its output in a file."""

    def __init__(self, folder: Path, *arguments: str, model: str = str(TINY_MODEL), **environment: str):
        self.output_path = folder / "serve.out"
        self.log_path = folder / "vllm.log"
        command = [*DEFAULT_SIGINT, sys.executable, "-m", "dc_trl", "serve", "--model", model, "--port", "0"]
        command += ["--log", str(self.log_path)]
        with open(self.output_path, "w") as output:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait(self, pattern: str, timeout: float = 280) -> re.Match:
        """The first match of a pattern in the output, once it is there."""
        end = time.monotonic() + timeout
        while True:
            if (found := re.search(pattern, self.output)) is not None:
                return found
            assert self.process.poll() is None, f"serve.py ended: {self.output[-2000:]}"
            assert time.monotonic() < end, f"no {pattern!r} in {self.output[-2000:]}"
            time.sleep(0.2)

    def url(self) -> str:
        return self.wait(r"vllm_server_base_url (\S+)")[1]

    def family(self) -> list[psutil.Process]:
        """The processes that serve.py started: the watchdog, the server, its engine."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(120)


@contextmanager
def serving(folder: Path, *arguments: str, model: str = str(TINY_MODEL), **environment: str):
    server = Serve(folder, *arguments, model=model, **environment)
    try:
        yield server
    finally:
        server.end()


def engine_processes(server: Any) -> list[psutil.Process]:
    """The process of a `VLLMServer`, and those that it has started."""
    parent = psutil.Process(server.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie that waits for its parent does not."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended between the two questions
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until_gone(processes: list[psutil.Process], timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while left := alive(processes):
        assert time.monotonic() < end, left
        time.sleep(0.2)


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that some of the processes hold open."""
    found = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):  # closed, or the process has ended
                found.add(os.readlink(link))
    return {Path(name) for name in found if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}


def complete(url: str, prompts: list[list[int]], **parameters: Any) -> list[dict[str, Any]]:
    """Completions with token ids and log-probabilities, by plain HTTP."""
    headers = {"Authorization": f"Bearer {os.environ.get('VLLM_API_KEY')}"}
    model = httpx.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"][0]["id"]
    request = {"model": model, "prompt": prompts, "logprobs": 0, "return_token_ids": True} | parameters
    response = httpx.post(f"{url}/v1/completions", headers=headers, json=request, timeout=120)
    assert response.status_code == 200, response.text
    return [
        {"ids": choice["token_ids"], "logps": choice["logprobs"]["token_logprobs"]}
        for choice in response.json()["choices"]
    ]
