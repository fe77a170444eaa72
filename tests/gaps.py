"""How far what an engine says of its own samples is from what a policy in its scheme would say of them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.sampling.replica import Replica

from .helpers import make_tokenizer, plain_logps, tiny_model


PROMPTS: list[list[int]] = make_tokenizer().apply_chat_template(
    arithmetic_dataset(16, seed=0, split="held_out")["prompt"][:], add_generation_prompt=True
)["input_ids"]
Choices = list[dict[str, list]]  # "ids" and "logps" of each completion


def replica_logps(model: PreTrainedModel, scheme: str, prompts: list, completions: list) -> torch.Tensor:
    """Log-probabilities of completions under the in-process replica, one forward for each."""
    replica = Replica(model, scheme).model
    return torch.cat([plain_logps(replica, prompt, ids) for prompt, ids in zip(prompts, completions, strict=True)])


def mean_gap(served: Choices, model: PreTrainedModel, scheme: str, prompts: list = PROMPTS) -> float:
    """Mean |Δp| between what an engine said of its own completions and the replica of a model."""
    expected = replica_logps(model, scheme, prompts, [choice["ids"] for choice in served])
    given = torch.tensor([logp for choice in served for logp in choice["logps"]])
    return (given.exp() - expected.exp()).abs().mean().item()


class SampledBy(TrainerCallback):
    """Measures in each step how far the engine is from the policy that samples, and from the one before it."""

    def __init__(self, scheme: str, complete: Callable[[], Choices]):
        self.gaps: list[tuple[float, float]] = []
        self._scheme = scheme
        self._complete = complete
        self._policies: list[dict[str, Any]] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._policies.append(copy.deepcopy(model.state_dict()))

    def on_step_end(self, args, state, control, **kwargs):
        # The engine still holds what sampled in this step; the policy has moved on.
        if len(self._policies) > 1:
            served = self._complete()
            present, before = (self._gap(served, weights) for weights in (self._policies[-1], self._policies[-2]))
            self.gaps.append((present, before))

    def _gap(self, served: Choices, weights: dict[str, Any]) -> float:
        model = tiny_model()
        model.load_state_dict(weights)
        return mean_gap(served, model, self._scheme)
