"""A server that samples the next generation batch while the present one trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..serving.errors import ServerError
from .background import BackgroundRollout
from .vllm_backends import Generation, ServerGeneration, agree, raised_together


class Claim(NamedTuple):
    """Whether the batch ahead fits a request, with the seconds of sampling it and of waiting for it."""

    fits: bool
    seconds: float = 0.0
    waited: float = 0.0


class OverlappedGeneration(ServerGeneration):
    """TRL's server mode, in which `begin` starts to sample a batch ahead that a later `generate` returns.

    Only the request to the server runs beside training, in a thread of the main process. Before it, all processes
    gather prompts in their main threads; after it, they distribute completions there. There is one batch ahead at a
    time. Everything else that needs the server waits for it first, so that one version of the weights samples it.

    See `ServerGeneration` for arguments and errors. `claim` raises the error of a batch ahead.
    """

    vllm_client: Any  # a `ServerClient`, or its stand-in while TRL's `generate` runs
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

    def claim(self, prompts: list[list[int]], num_generations: int) -> Claim:
        """Wait for the batch ahead. If it has these prompts, the next `generate` returns it; otherwise drop it.

        Every process has to call it.

        Raises:
            ServerError: the batch ahead could not be sampled.
        """
        request = self._request(prompts, num_generations)
        claim = Claim(fits=False)
        with raised_together(ServerError):
            ahead = self.ahead
            if ahead is not None and request is not None:
                ahead.result()
                if ahead.answers(request):
                    claim = Claim(True, ahead.seconds, ahead.waited)
                else:
                    self.ahead = None
        claim = agree(claim)
        self._claimed = claim.fits
        return claim

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        if not self._claimed:
            self.wait()
            return super().generate(prompts, *args, **kwargs)
        self._claimed = False
        if self.ahead is None:
            return super().generate(prompts, *args, **kwargs)
        ahead, client = self.ahead, self.vllm_client
        client.routed_experts = ahead.routed_experts  # an evaluation may have replaced them in between
        with self._in_place_of_client(_StandIn(lambda **request: ahead.result(), client)):
            return super().generate(prompts, *args, **kwargs)

    def wait(self) -> None:
        """Wait until the server has sampled the batch ahead."""
        if self.ahead is not None:
            self.ahead.wait()

    def drop(self) -> None:
        """Wait for the batch ahead and discard it."""
        self.wait()
        self.ahead, self._claimed = None, False

    def save_ahead(self, path: Path, weights: Path) -> str | None:
        """Save the batch ahead or, if it could not be sampled, its request and the weights to sample it with.

        Every process has to call it.

        Args:
            path: file of the batch or the request.
            weights: directory of the weights, see `save_weights`; it may exist already.

        Returns:
            "batch" or "request"; None if nothing was saved.
        """
        self.wait()
        requested = agree(self.ahead is not None)
        sampled = agree(self.ahead is not None and self.ahead.output is not None)
        if not (sampled or (requested and self.weight_sync == "checkpoint")):
            return None
        if self.ahead is not None:
            self.ahead.save(path)
            if not sampled and not weights.exists():
                self.save_weights(weights)
        return "batch" if sampled else "request"

    def load_ahead(self, path: Path) -> None:
        """Load what `save_ahead` wrote; sample a saved request with the weights that the server holds."""
        if self.accelerator.is_main_process:
            self.ahead = BackgroundRollout.load(path)
            if self.ahead.output is None:
                if self.ahead.seed is not None:
                    self.vllm_client.seeds.draw(self.ahead.seed)
                self.ahead.start(self.vllm_client)

    # --- weights: not while the server samples ----------------------------------------------------------------------

    def sync_weights(self) -> None:
        self.wait()
        super().sync_weights()

    def load_weights(self, directory: Path) -> None:
        self.wait()
        super().load_weights(directory)

    # --- what TRL would ask its client ------------------------------------------------------------------------------

    def _request(self, prompts: list[list[int]], num_generations: int) -> dict[str, Any] | None:
        """Return the request of TRL's `generate` to its client; None on other processes than the main one.

        Every process has to call it.
        """
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
    """Stand-in for a client, with the members that TRL's `generate` and ours use."""

    def __init__(self, generate: Callable[..., dict[str, Any]], client: Any):
        self.generate = generate
        if client is not None:
            self.routed_experts = client.routed_experts
