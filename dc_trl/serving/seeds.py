"""One seed for each prompt of a rollout, so that the same run samples the same completions again."""

from typing import Any

import numpy as np
import torch


class RolloutSeeds:
    """Seeds of the prompts of a rollout, derived from one number of PyTorch's generator.

    Checkpoints store that generator, so a resumed run draws the same number as an uninterrupted one.
    """

    def __init__(self) -> None:
        self._rollout_seed: int | None = None

    def draw(self, seed: int | None = None) -> int:
        """Draw the number of the next rollout and return it; otherwise `requests` draws it.

        Args:
            seed: number that was drawn for this rollout before, by a run that could not sample it.
        """
        self._rollout_seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        return self._rollout_seed

    def requests(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one request for each prompt of a body for /v1/completions, with the same seeds until `forget`.

        Greedy requests get no seed. A seed in the body is kept, so that all prompts draw the same numbers.
        """
        prompts = body["prompt"]
        requests = [body | {"prompt": [prompt]} for prompt in prompts]
        if body["temperature"] > 0 and body.get("seed") is None:
            rollout_seed = self.draw() if self._rollout_seed is None else self._rollout_seed
            # vLLM adds the number of a completion to the seed of its prompt, so the seeds must be far apart.
            seeds = np.random.SeedSequence(rollout_seed).generate_state(len(prompts), np.uint64)
            for request, seed in zip(requests, seeds, strict=True):
                request["seed"] = int(seed) >> 2
        return requests

    def forget(self) -> None:
        """End the rollout, so that the next one gets other seeds."""
        self._rollout_seed = None
