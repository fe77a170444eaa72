"""Rollouts that a server samples in the background, which can be saved and loaded."""

import json
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ..files import read_object, write_text
from ..serving.background import in_thread


class BackgroundRollout:
    """Completions of one request, which a client samples in a separate thread.

    Args:
        request: keyword arguments of the client's `generate`: `prompts`, and JSON-compatible settings.
        seed: seed that the client drew for the request; None if it draws none.

    Attributes:
        output: result of `generate`; None until it has returned, or if it failed.
        routed_experts: the client's routed experts of these completions.
        seconds: seconds that `generate` took.
        waited: seconds that `wait` spent waiting for it.
    """

    def __init__(self, request: dict[str, Any], seed: int | None = None):
        self.request, self.seed = request, seed
        self.output: dict[str, Any] | None = None
        self.routed_experts: list[np.ndarray | None] = []
        self.seconds = 0.0
        self.waited = 0.0
        self._task: Future[None] | None = None

    def start(self, client: Any) -> None:
        """Start the thread. Until `wait` has returned, nothing else may use the client."""
        self._task = in_thread(partial(self._sample, client))

    def _sample(self, client: Any) -> None:
        begin = time.perf_counter()
        try:
            self.output = client.generate(**self.request)
            self.routed_experts = client.routed_experts
        finally:
            self.seconds = time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until `generate` has returned or failed."""
        if self._task is not None and not self._task.done():
            begin = time.perf_counter()
            self._task.exception()
            self.waited += time.perf_counter() - begin

    def result(self) -> dict[str, Any]:
        """Wait for `generate`, and return its result.

        Raises:
            ServerError: `generate` raised it; any other error of `generate` is raised too.
        """
        self.wait()
        if self._task is not None:
            self._task.result()
        assert self.output is not None
        return self.output

    def answers(self, request: dict[str, Any]) -> bool:
        """Return whether these are completions of the same prompts with the same settings."""
        return self.request["prompts"] == request["prompts"] and _settings(self.request) == _settings(request)

    def save(self, path: Path) -> None:
        """Write the completions as a JSON file for `load`; if they could not be sampled, the request alone.

        Experts go to a safetensors file beside it, see `_experts_beside`.
        """
        self.wait()
        names = ("request", "seed", "output", "seconds", "waited")
        values = {name: getattr(self, name) for name in names} | {"routes": len(self.routed_experts)}
        write_text(path, json.dumps(values))
        routes = {str(i): np.ascontiguousarray(a) for i, a in enumerate(self.routed_experts) if a is not None}
        if routes:
            save_file(routes, _experts_beside(path))

    @classmethod
    def load(cls, path: Path) -> "BackgroundRollout":
        """Read what `save` wrote; `output` is None if the completions were not sampled."""
        values = read_object(path)
        rollout = cls(values["request"], values["seed"])
        rollout.output, rollout.seconds, rollout.waited = values["output"], values["seconds"], values["waited"]
        beside = _experts_beside(path)
        routes = load_file(beside) if beside.is_file() else {}
        rollout.routed_experts = [routes.get(str(index)) for index in range(values["routes"])]
        return rollout


def _experts_beside(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def _settings(request: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in request.items() if name != "prompts"}, sort_keys=True)
