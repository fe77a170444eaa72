"""The outside of a vLLM server for tests of what happens before and after vLLM's work, and when it never answers."""

import base64
import io
import json
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle

import httpx
import numpy as np

from dc_trl.serving.fit import CPU_EXTENSION


class StubServer(ThreadingHTTPServer):
    """Answers as a vLLM server in bf16 on a CPU would; to a rollout never, or what `completes` makes of its body.

    A POST to /fail with {"path": …, "times": …} has it fail at a path so many times. `says` has other answers, status
    and text, by path. `asked` has the paths in the order of the requests. `before` is told of each request first.
    """

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, connections that come together wait a second for another try

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.failures: dict[str, int] = {}
        self._counting = threading.Lock()  # of failures: requests come in threads of their own
        self.says: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        self.version = "default"
        self.start = "1"  # what a restarted server has another one of
        self.before: Callable[[StubServer, str], None] | None = None
        self.completes: Callable[[dict], dict] | None = None
        self.bodies: list[dict] = []  # of the rollouts that were asked for
        self.sessions: list[str] = []  # X-Session-ID of the rollouts that were asked for
        self.routes = False  # whether it returns the experts of its mixture
        self.ended = threading.Event()

    def reply(self, request: BaseHTTPRequestHandler, body: dict) -> tuple[int, str] | None:
        return self.answer(request.path.partition("?")[0], body)

    def answer(self, path: str, body: dict) -> tuple[int, str] | None:
        """Status and text of the answer to a request, None where the connection breaks."""
        self.asked.append(path)
        if self.before is not None:
            self.before(self, path)
        if path == "/fail":
            self.failures[body["path"]] = body["times"]
        with self._counting:
            if self.failures.get(path, 0) > 0:
                self.failures[path] -= 1
                return None
        if path == "/v1/completions":
            self.bodies.append(body)
        if path in self.says:
            return self.says[path]
        if path == "/v1/completions":
            if self.completes is not None:
                return 200, json.dumps(self.completes(body))
            self.ended.wait()
            return None
        if path == "/update_weight_version":
            self.version = body["new_version"]
        answers = {
            "/v1/models": {"data": [{"id": "stub", "root": "stub", "max_model_len": 4096}]},
            "/server_info": {
                "vllm_config": {
                    "instance_id": self.start,
                    "model_config": {
                        "logprobs_mode": "processed_logprobs",
                        "max_model_len": 4096,
                        "max_logprobs": -1,
                        "quantization": None,
                        "revision": None,
                    },
                    "cache_config": {"cache_dtype": "auto"},
                    "parallel_config": {"worker_extension_cls": CPU_EXTENSION},
                    "device_config": {"device": "cpu"},
                    "weight_transfer_config": {"backend": "nccl"},
                    "aux_output_config": {"enable_return_routed_experts": self.routes},
                }
            },
            "/version": {"version": "0.31.0"},
            "/collective_rpc": {"results": [""]},
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": True},
        }
        return 200, json.dumps(answers.get(path, {}))


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "X-Session-ID" in self.headers and self.path == "/v1/completions":
            self.server.sessions.append(self.headers["X-Session-ID"])
        answer = self.server.reply(self, json.loads(body or "{}"))
        if answer is None:
            self.close_connection = True
            return
        status, text = answer
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET  # noqa: N815 (http.server's name)

    def log_message(self, *args: object) -> None:
        pass


class Router(StubServer):
    """Passes all requests on, but for those that it `says` the answer of: to servers in turn, or one that it picks."""

    def __init__(self, urls: Sequence[str]):
        super().__init__()
        self.turns = cycle(urls)
        self.pick: Callable[[Message], str] = lambda headers: next(self.turns)

    def reply(self, request: BaseHTTPRequestHandler, body: dict) -> tuple[int, str]:
        if self.before is not None:
            self.before(self, request.path)
        if request.path in self.says:
            return self.says[request.path]
        url = self.pick(request.headers) + request.path
        answer = httpx.request(request.command, url, json=body or None, timeout=None, verify=False)
        return answer.status_code, answer.text


@contextmanager
def stub_server(server: StubServer | None = None):
    server = server or StubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def completions(
    prompts: list[list[int]], tokens: list[list[int]], routes: Sequence[np.ndarray] | None
) -> dict[str, list[dict]]:
    """What vLLM answers at /v1/completions: token ids, log-probabilities, routes as NumPy files in base64."""
    choices = []
    for index, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        names = [f"token_id:{token}" for token in ids]
        tops = [{name: -1.0} for name in names]
        logprobs = {"token_logprobs": [-1.0] * len(ids), "top_logprobs": tops, "tokens": names}
        reason = "stop" if ids[-1:] == [1] else "length"
        choice = {"index": index, "text": "7", "finish_reason": reason, "stop_reason": None}
        choices.append(choice | {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        if routes is not None:
            np.save(file := io.BytesIO(), routes[index])
            choices[-1]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return {"choices": choices}


def sampled(body: dict) -> dict[str, list[dict]]:
    """What vLLM answers: completions that hang on the prompt and the seed alone."""
    prompts, tokens = [], []
    for prompt in body["prompt"]:
        for index in range(body["n"]):
            draw = random.Random(f"{prompt} {body.get('seed', 0) + index}")
            prompts.append(prompt)
            tokens.append([draw.randrange(20, 200) for _ in range(draw.randrange(1, body["max_tokens"] + 1))])
    return completions(prompts, tokens, None)
