"""Routing replay: the trainer's mixture of experts uses the experts that the engine chose (R3, arXiv 2510.11370).

A router scores all experts of a token, p = softmax(logits), and selects the k best. Where two scores are nearly equal,
rounding decides, and the trainer may select another expert than the engine did. With replay, the trainer uses the
engine's experts e of a token, and computes their weights itself:

    w_i = p[e_i] / Σ_j p[e_j]    (without the sum where the model does not normalise)

So the gradient flows into the router, and only the selection is the engine's (arXiv 2510.11370, section 3.2).
A route holds the experts of one token in each layer that has a router, as int16; -1 where the engine chose none.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.utils import pad

from ..quantization.policy import base_model, unwrapped
from .part import Part


OWN_CHOICE = -1  # marks a token for which the engine chose no experts: the trainer chooses


# Routers of transformers that return (logits, scores, experts) with the scores of `expert_scores`.
_KNOWN = {f"{family}TopKRouter" for family in ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe")}


def routers_of(policy: PreTrainedModel | PeftModel) -> tuple[list[int], list[tuple[int, nn.Module]], bool]:
    """Return the routers of a mixture of experts.

    Returns:
        The numbers of the decoder layers that have a router, ascending; pairs of a router's position among them and
        the router, where PEFT's trained copy (`modules_to_save`) and its original have one position; and whether the
        scores of a token add up to 1.

    Raises:
        ValueError: the model has no router whose choice can be replayed.
    """
    model = base_model(policy)
    found: list[tuple[int, nn.Module]] = []
    for name, module in model.named_modules():
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer is not None and type(module).__name__ in _KNOWN:
            found.append((int(layer[1]), module))
    if not found:
        raise ValueError(
            f"routing_replay=True: {type(model).__name__} has no router whose choice can be replayed (only "
            f"{', '.join(sorted(_KNOWN))}): set routing_replay=False."
        )
    layers = sorted({layer for layer, _ in found})
    normalised = vars(found[0][1]).get("norm_topk_prob", True)
    return layers, [(layers.index(layer), module) for layer, module in found], normalised


def expert_scores(logits: Tensor, experts: Tensor, normalised: bool, dtype: torch.dtype) -> Tensor:
    """Return the weights of given experts: w_i = p[e_i] of p = softmax(logits), divided by their sum if `normalised`.

    They are, bit for bit, what a router of transformers returns for the experts of its own choice.

    Args:
        logits: scores of a router, shape (tokens, experts of the layer).
        experts: indices of experts, shape (tokens, k), integer.
        normalised: whether the weights of a token add up to 1.
        dtype: dtype of the weights, which are computed in float32.

    Returns:
        Shape (tokens, k).
    """
    scores = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    if normalised:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores.to(dtype)


class RoutesRecorder:
    """Records the experts that a mixture of experts chooses while it generates; errors are those of `routers_of`."""

    def __init__(self, model: PreTrainedModel):
        self._rows: int | None = None  # sequences of the batch that is being recorded
        layers, routers, _ = routers_of(model)
        self._calls: list[list[Tensor]] = [[] for _ in layers]
        for position, module in routers:
            module.register_forward_hook(partial(self._record, position))

    def _record(self, position: int, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._rows is not None:
            self._calls[position].append(output[2].unflatten(0, (self._rows, -1)).to(torch.int16))

    @contextmanager
    def recording(self, rows: int) -> Iterator[None]:
        """Record one call of `generate` with `rows` prompts, padded on the left."""
        self._rows = rows
        for calls in self._calls:
            calls.clear()
        try:
            yield
        finally:
            self._rows = None

    def routes(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[Tensor]:
        """Return the routes that were recorded last, as `batch_routes` takes them, on the CPU."""
        # Each call has read the columns that follow those of the call before.
        routes = torch.stack([torch.cat(calls, dim=1) for calls in self._calls], dim=2).cpu()
        width = max(map(len, prompt_ids))
        return [
            row[width - len(prompt) : width + len(completion) - 1]
            for row, prompt, completion in zip(routes, prompt_ids, completion_ids, strict=True)
        ]


def batch_routes(
    routes: Sequence[Tensor], prompt_ids: list[list[int]], completion_ids: list[list[int]], multiple: int | None
) -> Tensor:
    """Return the routes of a batch, padded as TRL pads its tokens: prompts on the left, completions on the right.

    Args:
        routes: routes of each prompt with its completion, without the last token, which the engine does not read:
            int16, shape (tokens, layers, k).
        prompt_ids, completion_ids: token ids of each prompt and of its completion.
        multiple: TRL's `pad_to_multiple_of`.

    Returns:
        int16, shape (batch, tokens, layers, k), `OWN_CHOICE` at padding and at the last token.
    """
    prompts, completions = [], []
    for known, prompt, completion in zip(routes, prompt_ids, completion_ids, strict=True):
        whole = known.new_full((len(prompt) + len(completion), *known.shape[1:]), OWN_CHOICE)
        whole[: len(known)] = known[: len(whole)]
        prompts.append(whole[: len(prompt)])
        completions.append(whole[len(prompt) :])
    return torch.cat(
        [
            pad(part, padding_value=OWN_CHOICE, padding_side=side, pad_to_multiple_of=multiple)
            for part, side in ((prompts, "left"), (completions, "right"))
        ],
        dim=1,
    )


def routes_of_vllm(arrays: Sequence[np.ndarray], layers: Sequence[int]) -> list[Tensor]:
    """Convert routes from vLLM's format to that of `batch_routes`.

    Args:
        arrays: `routed_experts` of each completion, unsigned, shape (tokens, layers, k); 0 in layers without experts.
        layers: numbers of the decoder layers that have a router.
    """
    return [torch.from_numpy(array[:, list(layers)].astype(np.int16)) for array in arrays]


class RoutingReplay:
    """Makes a policy use given experts, from `start` to `stop`.

    The hooks are on the routers alone, which read a row of tokens. Each hook counts the tokens of its router, and
    begins again after the last one. This works for forwards of a few sequences each, for one forward of all of them
    with its recomputation for the gradient, and with adapters, DDP and FSDP2 around the layers.

    Args:
        policy: mixture of experts, or a PEFT model around one.

    Raises:
        ValueError: see `routers_of`.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel):
        self.layers, routers, self._normalised = routers_of(policy)
        self._routes: Tensor | None = None
        self.flipped = torch.zeros(0, dtype=torch.bool)  # for which tokens the trainer would choose otherwise
        for position, module in routers:
            module.register_forward_hook(partial(self._replay, position))

    def start(self, routes: Tensor) -> None:
        """Replay routes in the forwards that follow, which must read the tokens of these routes in their order.

        Args:
            routes: routes of a batch, int16, shape (batch, tokens, layers, k).
        """
        self._routes = routes.flatten(0, 1)
        self._known = (self._routes[:, 0, 0] != OWN_CHOICE).sum()
        self._seen = [0] * len(self.layers)
        self.flipped = torch.zeros(len(self._routes), dtype=torch.bool, device=routes.device)

    def stop(self) -> None:
        """Let the policy choose its experts itself again."""
        self._routes = None

    def counts(self) -> Tensor:
        """Count the tokens with a route, and those for which the trainer would choose another expert in some layer.

        Returns:
            Of the latest routes that were replayed, shape (2,), int64.
        """
        return torch.stack([self._known, self.flipped.sum()])

    def _replay(
        self, position: int, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._routes is None:
            return None
        logits, scores, own = output
        begin, total = self._seen[position], len(self._routes)
        end = begin + len(own)
        # With gradients, all tokens have to be in one forward: parts would be recomputed from the last to the first.
        if end > total or (torch.is_grad_enabled() and len(own) != total):
            raise RuntimeError(f"a router reads {len(own)} tokens after {begin} of {total} whose routes are replayed")
        self._seen[position] = end % total
        engines = self._routes[begin:end, position].to(own.dtype)
        experts = torch.where(engines == OWN_CHOICE, own, engines)
        self.flipped[begin:end] |= (experts.sort(-1).values != own.sort(-1).values).any(-1)
        return logits, expert_scores(logits, experts, self._normalised, scores.dtype), experts


class Replay(Part):
    """The engine's routes of a generation batch, and their replay in the forwards of policy and reference model.

    The KL term compares the two models with the same experts.

    Raises:
        ValueError: the model has no routers that can be replayed, or conversations have several turns.
    """

    _COLUMN = "routed_experts"  # int16, shape (B, P+T, layers, k)

    def __init__(self, trainer):
        super().__init__(trainer)
        if trainer.tools:
            raise ValueError(
                "routing_replay=True replays one turn of the engine, and tools or environments make several: "
                "leave them out, or set routing_replay=False."
            )
        models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
        self._replays = [RoutingReplay(unwrapped(trainer.accelerator, model)) for model in models]
        replica = trainer.sampler.replica
        self._recorder = None if replica is None else RoutesRecorder(replica.model)
        self._routes: list[Tensor] = []  # those of the present batch

    def turn(self, sample, prompt_ids):
        if self._recorder is None:
            completion_ids, logprobs = sample()
            self._routes = routes_of_vllm(self.trainer.vllm_generation.routed_experts, self._replays[0].layers)
        else:
            with self._recorder.recording(len(prompt_ids)):
                completion_ids, logprobs = sample()
            self._routes = self._recorder.routes(prompt_ids, completion_ids)
        return completion_ids, logprobs

    def rollout(self, rollout):
        multiple = self.trainer.pad_to_multiple_of
        routes = batch_routes(self._routes, rollout.prompt_ids, rollout.completion_ids, multiple)
        rollout.columns[self._COLUMN] = routes.to(self.trainer.accelerator.device)

    def forward(self, score, model, inputs, *tokens, **options):
        if self._COLUMN not in inputs:  # a resumed batch may have none
            return score(*tokens, **options)
        for replay in self._replays:
            replay.start(inputs[self._COLUMN])
        try:
            return score(*tokens, **options)
        finally:
            # With a gradient not before it is there, since gradient checkpointing computes the forward again.
            if not torch.is_grad_enabled():
                self.after_backward()

    def loss(self, compute, inputs):
        loss = compute(inputs)
        if self._COLUMN in inputs:
            self._log(inputs)
        return loss

    def after_backward(self):
        for replay in self._replays:
            replay.stop()

    def _log(self, inputs: dict[str, Any]) -> None:
        """Log which share of the tokens of a loss was replayed, and how often the trainer would choose otherwise."""
        trainer = self.trainer
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        counts = torch.cat([tokens.view(1), self._replays[0].counts()])
        tokens, replayed, flipped = trainer.accelerator.gather(counts.unsqueeze(0)).sum(0).tolist()
        trainer.add_metric("routing/replayed_fraction", replayed / max(tokens, 1))
        trainer.add_metric("routing/flipped_fraction", flipped / max(replayed, 1))
