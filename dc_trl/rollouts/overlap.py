"""A server that samples one generation batch ahead, while the one before it trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..serving.errors import ServerError
from .background import BackgroundRollout
from .vllm_backends import Generation, ServerGeneration, agree, raised_together


class Claim(NamedTuple):
    """Whether the batch ahead answers a request, and the seconds of its sampling and of the waiting for it."""

    fits: bool
    seconds: float = 0.0
    waited: float = 0.0


class OverlappedGeneration(ServerGeneration):
    """TRL's server mode, in which `begin` has the server sample a batch that a later `generate` returns.

    Only the request to the server runs beside training, in a thread of the main process: prompts are gathered before,
    completions are sent to the other processes after, by all of them in their main threads. There is one such batch
    at a time. Whatever else needs the server waits for it first, so that it is sampled by one version of the weights,
    and keeps what it was sampled with.

    See `ServerGeneration` for arguments and errors. The error of a batch ahead is raised by `claim`.
    """

    vllm_client: Any  # a `ServerClient`, or what stands in for it while TRL's `generate` runs
    _ahead: BackgroundRollout | None = None  # on the main process, from `begin` to the next one or to `drop`
    _claimed = False  # whether the next `generate` returns it

    def begin(self, prompts: list[list[int]], num_generations: int) -> None:
        """Has the server begin to sample, with the weights that it holds. Every process has to call it.

        Args:
            prompts: token ids of this process's prompts, each one `num_generations` times, as `generate` gets them.
            num_generations: completions of a prompt.
        """
        request = self._request(prompts, num_generations)
        if request is not None:
            self.vllm_client.seeds.draw()  # in this thread, which also draws for training
            self._ahead = BackgroundRollout(request)
            self._ahead.start(self.vllm_client)

    def claim(self, prompts: list[list[int]], num_generations: int) -> Claim:
        """Waits for the batch ahead, which the next `generate` returns if it has these prompts; else it is dropped.

        Every process has to call it.

        Raises:
            ServerError: it could not be sampled; it is dropped.
        """
        request = self._request(prompts, num_generations)
        claim = Claim(fits=False)
        with raised_together(ServerError):
            ahead, self._ahead = self._ahead, None
            if ahead is not None and request is not None:
                ahead.result()
                if ahead.answers(request):
                    claim, self._ahead = Claim(True, ahead.seconds, ahead.waited), ahead
        claim = agree(claim)
        self._claimed = claim.fits
        return claim

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        if not self._claimed:
            self.wait()
            return super().generate(prompts, *args, **kwargs)
        self._claimed = False
        if self._ahead is None:
            return super().generate(prompts, *args, **kwargs)
        ahead, client = self._ahead, self.vllm_client
        client.routed_experts = ahead.routed_experts  # an evaluation may have been in between
        with self._in_place_of_client(_StandIn(lambda **request: ahead.result(), client)):
            return super().generate(prompts, *args, **kwargs)

    def wait(self) -> None:
        """Waits until the server samples nothing any more."""
        if self._ahead is not None:
            self._ahead.wait()

    def drop(self) -> None:
        """Forgets the batch ahead."""
        self.wait()
        self._ahead, self._claimed = None, False

    def save_ahead(self, path: Path) -> bool:
        """Writes the batch ahead, and returns whether there is one that did not fail. Every process has to call it."""
        self.wait()
        there = agree(self._ahead is not None and self._ahead.output is not None)
        if there and self._ahead is not None:
            self._ahead.save(path)
        return there

    def load_ahead(self, path: Path) -> None:
        """Takes up what `save_ahead` wrote."""
        if self.accelerator.is_main_process:
            self._ahead = BackgroundRollout.load(path)

    # --- weights: not while the server samples ----------------------------------------------------------------------

    def sync_weights(self, keep: bool = False) -> None:
        self.wait()
        super().sync_weights(keep)

    def go_back(self) -> None:
        self.wait()
        super().go_back()

    def load_weights(self, directory: Path) -> None:
        self.wait()
        super().load_weights(directory)

    # --- what TRL would ask its client ------------------------------------------------------------------------------

    def _request(self, prompts: list[list[int]], num_generations: int) -> dict[str, Any] | None:
        """What TRL's `generate` asks its client for, on the main process. Every process has to call it."""
        asked: list[dict[str, Any]] = []

        def record(**request: Any) -> dict[str, list]:
            asked.append(request)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": []}

        client = self.vllm_client if self.accelerator.is_main_process else None
        with self._in_place_of_client(_StandIn(record, client)):
            super(Generation, self).generate(prompts, None, num_generations)
        return asked[0] if asked else None

    @contextmanager
    def _in_place_of_client(self, stand_in: "_StandIn") -> Iterator[None]:
        if not self.accelerator.is_main_process:
            yield
            return
        client, self.vllm_client = self.vllm_client, stand_in
        try:
            yield
        finally:
            self.vllm_client = client


class _StandIn:
    """What TRL's `generate` and ours use of a client."""

    def __init__(self, generate: Callable[..., dict[str, Any]], client: Any):
        self.generate = generate
        if client is not None:
            self.routed_experts = client.routed_experts
            self.require_routes = client.require_routes
