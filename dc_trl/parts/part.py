"""`Part`: the protocol of what a run does beside the steps of TRL, where a setting asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor


# Log-probabilities and entropies, both of shape (rows, T), and the auxiliary loss.
Scores: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class Rollout:
    """The completions of a generation batch, of all turns.

    Attributes:
        prompt_ids, completion_ids: token ids of each completion and of its prompt.
        logprobs: log-probabilities of the completions' tokens, nats, as the engine returned them; None if it returned
            none. TRL gets what a part leaves here.
        mask: 1 at each token that the model wrote, 0 at those of tools; None if it wrote all. TRL gets this, too.
        columns: tensors and lists with one row for each completion, which go into the batch. TRL shuffles, splits and
            buffers them with its own, length-aware batches cut those as long as the completions, and a checkpoint
            within the batch has them.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    mask: list[list[int]] | None = None
    columns: dict[str, Any] = field(default_factory=dict)


class Part:
    """What a trainer does beside TRL's steps, in the order of a step. A part defines the methods that it needs.

    `trainer.parts` has those that are on.

    Args:
        trainer: the trainer, which is built but for its parts.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def prompts(self, prompts: list) -> None:
        """Act before a generation batch, or a batch of an evaluation, is sampled."""

    def turn(self, sample: Callable[[], Any], prompt_ids: list[list[int]]) -> Any:
        """Return the completions of one turn, which `sample` returns; see `sampling.sampler.Completions`."""
        return sample()

    def rollout(self, rollout: Rollout) -> None:
        """Read the completions of a batch, and add columns to it."""

    def rewards(self, rewards: Tensor) -> None:
        """Read the rewards of all processes by which groups are compared, shape (objectives, N), NaN without one."""

    def batch(self, batch: dict[str, Any]) -> None:
        """Read or change a batch that was sampled and scored."""

    def compare(self, batch: dict[str, Any], train_logps: Tensor) -> None:
        """Read or change the advantages of a batch by its log-probabilities before the first step on it.

        Args:
            batch: generation batch where TRL has scored it, which gives it `old_per_token_logps`; otherwise the
                micro-batch of a loss.
            train_logps: log π of the policy, shape (B, T), nats.
        """

    def slices(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the micro-batches of a new generation batch, or of an evaluation the only one."""
        return slices

    def forward(
        self, score: Callable[..., Scores], model: Any, inputs: dict[str, Any], *tokens: Any, **options: Any
    ) -> Scores:
        """Return the scores of one forward of policy or reference model, which `score` returns for the same arguments.

        Args:
            score: computes the forward.
            model: policy or reference model, perhaps wrapped.
            inputs: what is known of the rows: a micro-batch of the loss, which has `advantages`, or the columns.
            *tokens: ids and attention mask of prompts and completions, shape (rows, P + T), and T.
            **options: further arguments of the hook, by TRL's names; with `batch_size`, several forwards of as many
                rows score a whole generation batch.
        """
        return score(*tokens, **options)

    def scored(self, scores: Scores, inputs: dict[str, Any], *tokens: Any) -> Scores:
        """Return the scores of the loss's own forward, before the loss reads them and the advantages of `inputs`."""
        return scores

    def loss(self, compute: Callable[[dict[str, Any]], Tensor], inputs: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch, which `compute` returns."""
        return compute(inputs)

    def after_backward(self) -> None:
        """Act when the gradient of a micro-batch is there, or its computation has failed."""

    def trained(self, done: int) -> None:
        """Act at the end of a micro-batch; `done` of its generation batch were used, 0 when all were."""

    def evaluated(self) -> None:
        """Add metrics before the log of an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


class Parts(list[Part]):
    """The parts of a trainer in their order, of which each point of a step asks those that act there."""

    def at(self, point: str) -> list[Callable[..., Any]]:
        """Return the methods of this name of the parts that define it."""
        return [getattr(part, point) for part in self if getattr(type(part), point) is not getattr(Part, point)]

    def through(self, point: str, value: Any, *args: Any) -> Any:
        """Return a value after these methods have changed it, one after the other."""
        for method in self.at(point):
            value = method(value, *args)
        return value

    def around(self, point: str, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """Return a function around which these methods are, the later part around the earlier one."""
        for method in self.at(point):
            function = partial(method, function, *args)
        return function
