"""Makes the trainer's mixture of experts use the experts that the engine chose: `rollouts.routing` in TRL's hooks.

The routes of a generation batch are one of its tensors, `routed_experts`, shape (B, P+T, layers, k). TRL shuffles,
splits and buffers it with the tokens, and a checkpoint within the batch contains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import DCGRPOConfig
from ..quantization.policy import unwrapped
from ..rollouts.padding_free import Packing
from .overlap import OverlapTrainer


# Imported only where a run replays routes.
if TYPE_CHECKING:
    from ..rollouts.routing import RoutesRecorder, RoutingReplay, Turn


class RoutingTrainer(OverlapTrainer):
    """A trainer that replays the engine's routes if `routing_replay` is set, and otherwise acts as its base class.

    Raises:
        ValueError: the model has no routers that can be replayed.
    """

    # Replays for the policy and any reference model: the KL term compares them with the same experts.
    _replays: tuple[RoutingReplay, ...] = ()
    _recorder: RoutesRecorder | None = None  # records the replica's routes
    # Between hooks of TRL: the turns that the engine sampled for the present batch, and the batch's routes.
    _turns: list[Turn]
    _routes: Tensor | None = None

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if args.routing_replay:
            from ..rollouts.routing import RoutesRecorder, RoutingReplay

            models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
            self._replays = tuple(RoutingReplay(unwrapped(self.accelerator, model)) for model in models)
            if self.replica is not None:
                self._recorder = RoutesRecorder(self.replica.model)

    # --- the engine's choice ----------------------------------------------------------------------------------------

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not self._replays:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        from ..rollouts.routing import Turn, routes_of_vllm

        if self._recorder is None:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            routes = routes_of_vllm(self.vllm_generation.routed_experts, self._replays[0].layers)
        else:
            with self._recorder.recording(len(prompt_ids)):
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            routes = self._recorder.routes(prompt_ids, completion_ids)
        self._turns.append(Turn(prompt_ids, routes))
        return completion_ids, logprobs

    def _generate(self, prompts):
        self._turns = []
        prompt_ids, completion_ids, *others = super()._generate(prompts)
        if self._replays:
            from ..rollouts.routing import batch_routes

            routes = batch_routes(self._turns, prompt_ids, completion_ids, self.pad_to_multiple_of)
            self._routes = routes.to(self.accelerator.device)
        return prompt_ids, completion_ids, *others

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self._routes is not None:
            batch["routed_experts"] = self._routes
            self._stop_replay()
        return batch

    # --- the trainer's forward --------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        if self._routes is not None:
            # Without padding the routers read one row of real tokens.
            routes = self._routes if self.padding_free is None else Packing(attention_mask).pack(self._routes)
            for replay in self._replays:
                replay.start(routes)
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        self._routes = inputs.get("routed_experts")
        loss = super()._compute_loss(model, inputs)
        if self._routes is not None:
            self._log_routing(inputs)
            if not torch.is_grad_enabled():
                self._stop_replay()
        return loss

    def training_step(self, model, inputs, num_items_in_batch):
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._stop_replay()  # not earlier, since gradient checkpointing computes the forward again

    def _stop_replay(self) -> None:
        self._routes = None
        for replay in self._replays:
            replay.stop()

    def _log_routing(self, inputs: dict[str, Any]) -> None:
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        counts = torch.cat([tokens.view(1), self._replays[0].counts()])
        tokens, replayed, flipped = self.accelerator.gather(counts.unsqueeze(0)).sum(0).tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["routing/replayed_fraction"].append(replayed / max(tokens, 1))
        metrics["routing/flipped_fraction"].append(flipped / max(replayed, 1))
