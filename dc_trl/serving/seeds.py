"""A seed for each prompt of a rollout, so that the same run samples the same again."""

from typing import Any

import numpy as np
import torch


class RolloutSeeds:
    """Seeds of the prompts of a rollout, all from one that is drawn from PyTorch's generator.

    A checkpoint keeps that generator, so that a resumed run draws what an uninterrupted one would have drawn.
    """

    def __init__(self) -> None:
        self._of_rollout: int | None = None

    def draw(self) -> None:
        """Draws for the next rollout now. `requests` does it where this was not called."""
        self._of_rollout = int(torch.randint(2**62, ()).item())

    def requests(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A request for each prompt of a body for /v1/completions; with the same seeds again until `forget`.

        Greedy ones get no seed, and those whose body has one keep it: all prompts then draw the same numbers.
        """
        prompts = body["prompt"]
        requests = [body | {"prompt": [prompt]} for prompt in prompts]
        if body["temperature"] > 0 and body.get("seed") is None:
            if self._of_rollout is None:
                self.draw()
            # vLLM counts on from a seed for the prompt's completions, so they are far apart.
            seeds = np.random.SeedSequence(self._of_rollout).generate_state(len(prompts), np.uint64)
            for request, seed in zip(requests, seeds, strict=True):
                request["seed"] = int(seed) >> 2
        return requests

    def forget(self) -> None:
        """The rollout is over, and the next one gets other seeds."""
        self._of_rollout = None
