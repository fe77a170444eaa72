"""The policy's forward against its deployed form's on the same contexts: by vocabulary, by layer and by router."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..quantization.deployed_forward import DeployedForward
from ..quantization.policy import base_model, scaled_logits
from ..records.estimators import Estimate
from ..rollouts.routing import Routers
from .mismatch import ratio_estimate
from .result import LayerDifference
from .rollouts import Policy, Rollout, routes_are_known
from .scoring import Rows, batches
from .settings import CalibrationSettings
from .tokens import Array


_BATCH_TOKENS = 2048  # of a forward, whose hidden states are held in all layers
_LOGITS = 2**26  # of each side that are held


@torch.no_grad()
def compare_forwards(
    policy: Policy,
    engine: Policy,
    deployed: DeployedForward,
    prompts: Sequence[list[int]],
    rollouts: Sequence[Rollout],
    settings: CalibrationSettings,
) -> tuple[dict[str, Estimate], list[LayerDifference]]:
    """Compares what both sides compute at each token that predicts one of a completion.

    Args:
        policy: copy of the policy, which the comparison changes.
        engine: copy of what the engine runs, which the comparison changes.
        deployed: the deployed forward of that copy.
        prompts, rollouts: token ids, and completions of them.
        settings: of the calibration.

    Returns:
        `vocabulary` and `layers` of a `Diagnosis`.
    """
    policy.eval()
    engine.eval()
    trained, served = _Reading(policy), _Reading(engine)
    sums: dict[str, Array] = defaultdict(lambda: np.zeros(len(prompts)))
    order = sorted((i for i, r in enumerate(rollouts) if r.ids), key=lambda i: len(rollouts[i].ids))
    for batch in batches(order, prompts, rollouts, min(settings.batch_tokens, _BATCH_TOKENS)):
        rows = Rows.of(prompts, [rollouts[i] for i in batch])
        prompt_of = np.concatenate([[rollout.prompt] * len(rollout.ids) for rollout in rows.rollouts])

        def add(name: str, values: Tensor, of: Any = prompt_of) -> None:
            sums[name] += np.bincount(of, values.double().cpu().numpy(), len(prompts))

        def compare(theirs: Tensor, ours: Tensor, of: Any = prompt_of) -> None:
            size = max(1, _LOGITS // policy.config.get_text_config().vocab_size)
            for start in range(0, len(ours), size):
                part = slice(start, start + size)
                p, q = (
                    reading.log_probs(h[part], settings.temperature)
                    for reading, h in ((trained, ours), (served, theirs))
                )
                add("kl", (q.exp() * (q - p)).sum(-1), of[part])
                add("total_variation", (q.exp() - p.exp()).abs().sum(-1) / 2, of[part])
                add("top1_flips", p.argmax(-1) != q.argmax(-1), of[part])

        read: list[Tensor] = []
        ours, our_experts = trained.read(rows, settings.bf16, read.append)
        with deployed.active():
            theirs, their_experts = served.read(rows, settings.bf16, partial(compare, ours=read[0]))
        for number, (h, other) in enumerate(zip(ours, theirs, strict=True)):
            h, other = h.float(), other.float()
            add(f"layer {number}", (other - h).norm(dim=-1))
            add(f"size {number}", h.norm(dim=-1))
        for number, chosen in our_experts.items():
            add(f"router {number}", (chosen != their_experts[number]).any(-1))
        sums["tokens"] += np.bincount(prompt_of, minlength=len(prompts))

    def mean(name: str, over: str = "tokens") -> Estimate:
        return ratio_estimate(sums[name], sums[over], settings.seed)

    layers = []
    for number in range(sum(name.startswith("layer") for name in sums)):
        # The hidden state behind decoder layer n is the n + 1st; the first is the embedding's.
        router = f"router {number - 1}"
        relative = mean(f"layer {number}", over=f"size {number}")
        layers.append(LayerDifference(relative, mean(router) if router in sums else None))
    return {name: mean(name) for name in ("kl", "total_variation", "top1_flips")}, layers


class _Reading:
    """A model that shows what it computes at the tokens that predict the completions of a batch."""

    def __init__(self, view: Policy):
        self._model: Any = base_model(view)
        self._head = self._model.get_output_embeddings()
        self._own_head = self._head.forward
        self._experts: dict[int, Tensor] = {}  # by decoder layer
        if routes_are_known(view):
            routers = Routers(view)
            for position, module in routers.modules:
                module.register_forward_hook(partial(self._keep, routers.layers[position]))

    def _keep(self, layer: int, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._experts[layer] = output[2].sort(-1).values

    def log_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """Of the whole vocabulary, float32, shape (tokens, vocabulary), from what the head reads."""
        logits = scaled_logits(self._own_head(hidden).float(), self._model.config.get_text_config())
        return (logits / temperature).log_softmax(-1)

    def read(
        self, rows: Rows, bf16: bool, at_head: Callable[[Tensor], None]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Hidden states by layer, shape (tokens, channels), and chosen experts by decoder layer, shape (tokens, k).

        `at_head` gets what the head reads, while the head's own weights are in place.
        """
        scored = (rows.labels()[:, -rows.height :] != -100).to(self._model.device)

        def predicting(values: Tensor) -> Tensor:
            """Of shape (rollouts, tokens, …), those that predict a token of a completion, one after another."""
            return values[:, -rows.height - 1 : -1][scored]

        def forward(hidden: Tensor) -> Tensor:
            at_head(predicting(hidden))
            return self._own_head(hidden[:, -1:])

        self._head.forward = forward
        inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=bf16):
            output = self._model(
                **{name: tensor.to(self._model.device) for name, tensor in inputs.items()},
                use_cache=False,
                output_hidden_states=True,
                logits_to_keep=rows.height + 1,
            )
        shape = rows.input_ids.shape
        experts = {layer: predicting(chosen.unflatten(0, shape)) for layer, chosen in sorted(self._experts.items())}
        return [predicting(hidden) for hidden in output.hidden_states], experts
