"""A server that samples the next generation batch while the present one trains."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ..files import read_object, write_text
from ..processes import agree, raised_together
from ..serving.background import in_thread
from ..serving.completions import EndToken, ended
from ..serving.errors import ServerError
from .vllm_backends import Generation, ServerGeneration


class BackgroundRollout:
    """Completions of one request, which a client samples in a separate thread.

    Args:
        request: keyword arguments of the client's `generate`: `prompts`, and JSON-compatible settings.
        seed: number that the client drew for the request.

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
        mine, theirs = (json.dumps(each, sort_keys=True) for each in (self.request, request))
        return mine == theirs

    def save(self, path: Path) -> None:
        """Write the completions, or the request alone if they failed, as JSON for `load`, and their experts beside."""
        values = {name: getattr(self, name) for name in ("request", "seed", "output", "seconds", "waited")}
        ids = [] if self.output is None else self.output["completion_ids"]
        by_engine = [isinstance(row[-1], EndToken) if row else False for row in ids]
        write_text(path, json.dumps(values | {"routes": len(self.routed_experts), "ended": by_engine}))
        routes = {str(i): np.ascontiguousarray(a) for i, a in enumerate(self.routed_experts) if a is not None}
        if routes:
            save_file(routes, path.with_suffix(".safetensors"))

    @classmethod
    def load(cls, path: Path) -> "BackgroundRollout":
        """Read what `save` wrote; `output` is None if the completions were not sampled."""
        values = read_object(path)
        rollout = cls(values["request"], values["seed"])
        rollout.output, rollout.seconds, rollout.waited = values["output"], values["seconds"], values["waited"]
        if rollout.output is not None:
            rows = zip(rollout.output["completion_ids"], values["ended"], strict=True)
            rollout.output["completion_ids"] = [ended(row) if by_engine else row for row, by_engine in rows]
        beside = path.with_suffix(".safetensors")
        routes = load_file(beside) if beside.is_file() else {}
        rollout.routed_experts = [routes.get(str(index)) for index in range(values["routes"])]
        return rollout


class OverlappedGeneration(ServerGeneration):
    """TRL's server mode, in which `begin` starts to sample a batch ahead that a later `generate` returns.

    Only the request to the server runs beside training, in a thread of the main process. Before it, all processes
    gather prompts in their main threads; after it, they distribute completions there. There is one batch ahead at a
    time. Everything else that needs the server waits for it first, so that one version of the weights samples it.

    See `ServerGeneration` for arguments and errors. `claim` raises the error of a batch ahead.
    """

    ahead: BackgroundRollout | None = None  # on the main process, from `begin` to the next `begin` or `drop`
    _claimed = False  # whether the next `generate` returns the batch ahead

    def begin(self, prompts: list[list[int]], num_generations: int) -> None:
        """Start to sample a batch with the weights that the server holds. Every process has to call it.

        Args:
            prompts: token ids of this process's prompts, each one `num_generations` times, as for `generate`.
            num_generations: number of completions of a prompt.
        """
        request = self._request(prompts, num_generations)
        if request is not None:
            seed = self.vllm_client.seeds.draw()  # in this thread, which also draws for training
            self.ahead = BackgroundRollout(request, seed)
            self.ahead.start(self.vllm_client)

    def claim(self, prompts: list[list[int]], num_generations: int) -> tuple[float, float] | None:
        """Wait for the batch ahead. If it has these prompts, the next `generate` returns it; otherwise drop it.

        Every process has to call it.

        Returns:
            The seconds of sampling the batch and of waiting for it; None if it is dropped.

        Raises:
            ServerError: the batch ahead could not be sampled.
        """
        request = self._request(prompts, num_generations)
        seconds = None
        with raised_together(ServerError):
            ahead = self.ahead
            if ahead is not None and request is not None:
                ahead.result()
                if ahead.answers(request):
                    seconds = ahead.seconds, ahead.waited
                else:
                    self.ahead = None
        seconds = agree(seconds)
        self._claimed = seconds is not None
        return seconds

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        ahead, claimed, self._claimed = self.ahead, self._claimed, False
        if ahead is None or not claimed:
            self.wait()
            return super().generate(prompts, *args, **kwargs)
        self.vllm_client.routed_experts = ahead.routed_experts  # an evaluation may have replaced them in between
        with self._asking(lambda **request: ahead.result()):
            return super().generate(prompts, *args, **kwargs)

    def wait(self) -> None:
        """Wait until the server has sampled the batch ahead."""
        if self.ahead is not None:
            self.ahead.wait()

    def drop(self) -> None:
        """Wait for the batch ahead and discard it."""
        self.wait()
        self.ahead, self._claimed = None, False

    def save_ahead(self, path: Path, weights: Path, held: bool) -> bool:
        """Save the batch ahead or, if it failed, its request and weights; return whether. All processes call it.

        Args:
            path: file of the batch.
            weights: folder of its weights, which may have been saved already.
            held: whether the server still holds these weights.
        """
        self.wait()
        ahead = self.ahead
        sampled = ahead is not None and ahead.output is not None
        known = ahead is not None and self.weight_sync == "checkpoint" and (held or weights.exists())
        saved = agree(sampled or known)
        if saved and ahead is not None:
            ahead.save(path)
            if not sampled and not weights.exists():
                self.save_weights(weights)
        return saved

    def load_ahead(self, path: Path, weights: Path) -> bool:
        """Load what `save_ahead` saved, and return whether it was a request: that is sampled now, with its weights."""
        if self.accelerator.is_main_process:
            self.ahead = BackgroundRollout.load(path)
        requested = agree(self.ahead is not None and self.ahead.output is None)
        if requested:
            self.load_weights(weights)
            if self.ahead is not None:
                self.vllm_client.seeds.draw(self.ahead.seed)
                self.ahead.start(self.vllm_client)
        return requested

    def sync_weights(self) -> None:
        self.wait()
        super().sync_weights()

    def load_weights(self, directory: Path) -> None:
        self.wait()
        super().load_weights(directory)

    def _request(self, prompts: list[list[int]], num_generations: int) -> dict[str, Any] | None:
        """Return the request of TRL's `generate` to its client; None on other processes than the main one.

        Every process has to call it.
        """
        asked: list[dict[str, Any]] = []

        def record(**request: Any) -> dict[str, list]:
            asked.append(request)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": []}

        with self._asking(record):
            super(Generation, self).generate(prompts, None, num_generations)
        return asked[0] if asked else None

    @contextmanager
    def _asking(self, generate: Callable[..., dict[str, Any]]) -> Iterator[None]:
        """Let TRL's `generate` ask a function in the place of its client, on the main process."""
        client = self.vllm_client if self.accelerator.is_main_process else None
        if client is not None:
            self.vllm_client = SimpleNamespace(generate=generate, routed_experts=client.routed_experts)
        try:
            yield
        finally:
            if client is not None:
                self.vllm_client = client
