"""Makes the trainer's mixture of experts use the experts that the engine chose; see `rollouts.routing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..rollouts.routing import RoutesRecorder, RoutingReplay, batch_routes, routes_of_vllm
from ..trl_hooks import Completions, HookedTrainer


class Replay:
    """The engine's routes of a generation batch, and their replay in the forwards of policy and reference model.

    The KL term compares the two models with the same experts.

    Args:
        trainer: trainer whose models replay.
        engine: replica that samples, or TRL's vLLM engine.

    Raises:
        ValueError: the model has no routers that can be replayed, or conversations have several turns.
    """

    def __init__(self, trainer: HookedTrainer, engine: Any):
        if trainer.tools:
            raise ValueError(
                "routing_replay=True replays one turn of the engine, and tools or environments make several: "
                "leave them out, or set routing_replay=False."
            )
        self._trainer, self._engine = trainer, engine
        self._replays = [RoutingReplay(model) for model in trainer.scored_models()]
        self._recorder = None if trainer.use_vllm else RoutesRecorder(engine.model)
        self._routes: list[Tensor] = []  # those of the present batch

    # --- the engine's choice ----------------------------------------------------------------------------------------

    def sample(self, prompt_ids: list[list[int]], sample: Callable[[], Completions]) -> Completions:
        """Return what `sample` returns for a batch, and keep its routes."""
        if self._recorder is None:
            completion_ids, logprobs = sample()
            self._routes = routes_of_vllm(self._engine.routed_experts, self._replays[0].layers)
        else:
            with self._recorder.recording(len(prompt_ids)):
                completion_ids, logprobs = sample()
            self._routes = self._recorder.routes(prompt_ids, completion_ids)
        return completion_ids, logprobs

    def routes(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> Tensor:
        """Return the routes of the present batch, int16, shape (B, P+T, layers, k)."""
        routes = batch_routes(self._routes, prompt_ids, completion_ids, self._trainer.pad_to_multiple_of)
        return routes.to(self._trainer.accelerator.device)

    # --- the trainer's forward --------------------------------------------------------------------------------------

    def start(self, routes: Tensor) -> None:
        """Replay routes, shape (B, P+T, layers, k), in the forwards that follow."""
        for replay in self._replays:
            replay.start(routes)

    def stop(self) -> None:
        """Let the models choose their experts themselves again."""
        for replay in self._replays:
            replay.stop()

    def log(self, inputs: dict[str, Any]) -> None:
        """Log which share of the tokens of a loss was replayed, and how often the trainer would choose otherwise."""
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        counts = torch.cat([tokens.view(1), self._replays[0].counts()])
        tokens, replayed, flipped = self._trainer.accelerator.gather(counts.unsqueeze(0)).sum(0).tolist()
        self._trainer.add_metric("routing/replayed_fraction", replayed / max(tokens, 1))
        self._trainer.add_metric("routing/flipped_fraction", flipped / max(replayed, 1))
