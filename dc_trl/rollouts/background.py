"""Rollouts that a server samples in the background, which can be saved and loaded."""

import json
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors import safe_open
from safetensors.numpy import save_file

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
        """Write the completions as a safetensors file for `load`, with log-probabilities in float64, as JSON has them.

        If they could not be sampled, write the request alone.
        """
        self.wait()
        arrays = _packed("prompts", self.request["prompts"], np.int64)
        values: dict[str, Any] = {"seconds": self.seconds, "waited": self.waited, "routes": len(self.routed_experts)}
        values |= {"seed": self.seed, "sampled": self.output is not None}
        if self.output is not None:
            arrays |= self._arrays(self.output)
        save_file(arrays, path, metadata={"settings": _settings(self.request), "values": json.dumps(values)})

    def _arrays(self, output: dict[str, Any]) -> dict[str, np.ndarray]:
        arrays = _packed("completion_ids", output["completion_ids"], np.int64)
        for name, dtype in _TOKEN_VALUES.items():
            # There are several values for each token, as many as the server has returned.
            arrays[f"{name}.tokens"] = np.array([len(completion) for completion in output[name]], np.int64)
            arrays |= _packed(name, [token for completion in output[name] for token in completion], dtype)
        for index, routes in enumerate(self.routed_experts):
            if routes is not None:
                arrays[f"routed_experts.{index}"] = np.ascontiguousarray(routes)
        return arrays

    @classmethod
    def load(cls, path: Path) -> "BackgroundRollout":
        """Read what `save` wrote; `output` is None if the completions were not sampled."""
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        prompts, values = _unpacked("prompts", arrays), json.loads(metadata["values"])
        rollout = cls({"prompts": prompts} | json.loads(metadata["settings"]), values.get("seed"))
        if not values.get("sampled", True):  # the key is absent in older checkpoints
            return rollout
        rollout.output = {"prompt_ids": prompts, "completion_ids": _unpacked("completion_ids", arrays)}
        for name in _TOKEN_VALUES:
            rollout.output[name] = _split(_unpacked(name, arrays), arrays[f"{name}.tokens"])
        rollout.routed_experts = [arrays.get(f"routed_experts.{index}") for index in range(values["routes"])]
        rollout.seconds, rollout.waited = values["seconds"], values["waited"]
        return rollout


# Values of each token in the client's output, with their dtypes.
_TOKEN_VALUES = {"logprobs": np.float64, "logprob_token_ids": np.int64}


def _settings(request: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in request.items() if name != "prompts"}, sort_keys=True)


def _packed(name: str, rows: list[list[Any]], dtype: DTypeLike) -> dict[str, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int64)
    return {name: np.array([value for row in rows for value in row], dtype), f"{name}.lengths": lengths}


def _unpacked(name: str, arrays: dict[str, np.ndarray]) -> list[list[Any]]:
    return _split(arrays[name].tolist(), arrays[f"{name}.lengths"])


def _split(values: list[Any], lengths: np.ndarray) -> list[list[Any]]:
    ends = np.cumsum(lengths)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
