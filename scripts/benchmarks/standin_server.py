"""Stands for a vLLM server where its work is of no matter: it sleeps, and answers with tokens that follow from the
prompts and the weights.

python scripts/benchmarks/standin_server.py    serves until it is ended, and prints its address

It speaks what the trainer asks of `vllm serve` in server mode with weight_sync=checkpoint: a rollout takes
`seconds`, whatever is asked, and no processor time. The tokens and log-probabilities are drawn from the prompt and the
bytes of the weights that were loaded last. Whoever resumes a run gets the same ones.
"""

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from dc_trl.serving.fit import CPU_EXTENSION


class Asked(NamedTuple):
    """A request, as it ended."""

    path: str
    version: str  # of the weights, when it came
    begin: float  # seconds, of the same clock
    end: float
    prompts: list[list[int]]
    others: int  # rollouts that were running when it came


class StandInServer(ThreadingHTTPServer):
    """See this file; in tests, `asked` has the rollouts and loads in the order in which they ended.

    Attributes:
        seconds: that a rollout takes. A POST to /sleep with {"seconds": …} sets it.
        shortest: tokens that a completion has at least; all have `max_tokens` where it is None.
        down: whether it breaks connections in place of answers.
    """

    daemon_threads = True
    request_queue_size = 128  # a batch of requests comes at once

    def __init__(self, seconds: float = 0.0, shortest: int | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.seconds = seconds
        self.shortest = shortest
        self.down = False
        self.asked: list[Asked] = []
        self.running = 0
        self._version = "default"
        self._weights = b""
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request, None where the connection breaks."""
        if self.down:
            return None
        if path == "/sleep":
            self.seconds = body["seconds"]
        elif path == "/update_weight_version":
            self._version = body["new_version"]
        elif path == "/collective_rpc" and "weights_path" in body["kwargs"]:
            with self._recorded(path, []):
                weights = Path(body["kwargs"]["weights_path"], "model.safetensors").read_bytes()
                self._weights = hashlib.sha256(weights).digest()
        elif path == "/v1/completions":
            return self._complete(body)
        return _ANSWERS.get(path, {}) | ({"weight_version": self._version} if path == "/weight_info" else {})

    def _complete(self, body: dict[str, Any]) -> dict[str, Any] | None:
        with self._recorded("/v1/completions", body["prompt"]):
            choices = [
                self._choice(prompt, index, body["max_tokens"])
                for prompt in body["prompt"]
                for index in range(body["n"])
            ]
            for index, choice in enumerate(choices):
                choice["index"] = index
            end = time.monotonic() + self.seconds
            while (left := end - time.monotonic()) > 0 and not self.down:
                time.sleep(min(left, 0.02))
        return None if self.down else {"choices": choices}

    def _choice(self, prompt: list[int], index: int, longest: int) -> dict[str, Any]:
        rng = random.Random(self._weights + repr((prompt, index)).encode())
        length = longest if self.shortest is None else rng.randint(self.shortest, longest)
        tokens = [rng.randrange(10, 200) for _ in range(length)]
        logps = [-rng.uniform(0.01, 6.0) for _ in tokens]
        names = [f"token_id:{token}" for token in tokens]
        tops = [{name: value} for name, value in zip(names, logps, strict=True)]
        logprobs = {"token_logprobs": logps, "top_logprobs": tops, "tokens": names}
        end = "length" if length == longest else "stop"
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs, "finish_reason": end}

    @contextmanager
    def _recorded(self, path: str, prompts: list[list[int]]) -> Iterator[None]:
        begin, version = time.monotonic(), self._version
        with self._lock:
            others = self.running
            self.running += path == "/v1/completions"
        try:
            yield
        finally:
            with self._lock:
                self.running -= path == "/v1/completions"
                self.asked.append(Asked(path, version, begin, time.monotonic(), prompts, others))


# What a server in bf16 on a CPU answers.
_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/models": {"data": [{"id": "stand-in", "root": "stand-in", "max_model_len": 4096}]},
    "/server_info": {
        "vllm_config": {
            "model_config": {
                "logprobs_mode": "processed_logprobs",
                "max_model_len": 4096,
                "max_logprobs": -1,
                "quantization": None,
                "revision": None,
            },
            "cache_config": {"cache_dtype": "auto"},
            "parallel_config": {"worker_extension_cls": CPU_EXTENSION, "data_parallel_size": 1},
            "scheduler_config": {"max_num_seqs": 256, "enable_chunked_prefill": False},
            "device_config": {"device": "cpu"},
        }
    },
    "/collective_rpc": {"results": [""]},
    "/version": {"version": "0.31.0"},
    "/weight_info": {},
    "/reset_prefix_cache": {"success": True},
}


class _Handler(BaseHTTPRequestHandler):
    server: StandInServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.answer(self.path.partition("?")[0], json.loads(body or "{}"))
        if answer is None:
            self.close_connection = True
            return
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET  # noqa: N815 (http.server's name)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def standing_in(**options: Any) -> Iterator[StandInServer]:
    """A server in a thread of this process, for tests."""
    server = StandInServer(**options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.down = True
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    server = StandInServer()
    print(server.url, flush=True)
    server.serve_forever()
