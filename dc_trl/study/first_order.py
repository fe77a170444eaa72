"""Where each form of the constraint pushes a policy, to first order: mismatch, entropy, reward per unit of movement.

A small step is taken along the gradient of one form alone, with the second moments of the run's own optimizer. What
changes is computed over the whole vocabulary, on contexts that the gradient has not seen, and divided by how far the
step moves the policy: forms whose λ have different units can then be compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..constraint.forms import Form, form_of
from ..constraint.settings import ConstraintForm, ConstraintSettings
from ..constraint.trust import Trust, trust_of
from ..trainer import DCGRPOTrainer
from .trained import completion_config, policy_completions


# Movement of a step: mean total variation between the policy before and after, over contexts.
MOVEMENT = 1e-3
FORMS: tuple[ConstraintForm, ...] = ("injected", "complete", "quadratic", "log_ratio")


class Batch(NamedTuple):
    """Sampled completions, the tokens right-padded.

    Args:
        ids: prompts and completions, shape (B, L).
        attended: whether a token is one of them, shape (B, L).
        scored: whether it is one of a completion, shape (B, L − 1): entry t is about the token at t + 1.
        infer_logps: the sampler's log-probability of that token, shape (B, L − 1), nats; 0 where not scored.
        rewards: shape (B,).
        advantages: normalised within the completions of a prompt, shape (B,).
    """

    ids: Tensor
    attended: Tensor
    scored: Tensor
    infer_logps: Tensor
    rewards: Tensor
    advantages: Tensor


class Change(NamedTuple):
    """What a step changes for each unit of movement (total variation between the policy before and after).

    Args:
        total_variation: of policy and sampler, mean over contexts.
        kl: KL(π ‖ q), nats.
        expected_discrepancy: E_π |π − q|, the paper's δ without the noise of sampling.
        entropy: of the policy, nats.
        reward: of the policy, by the score function on its own completions.
    """

    total_variation: float
    kl: float
    expected_discrepancy: float
    entropy: float
    reward: float


class _Distributions(NamedTuple):
    """Of a policy and a sampler at the contexts of completions.

    Args:
        policy, sampler: log π and log q of the whole vocabulary, shape (N, V).
        tokens: log π of the tokens that follow, shape (B, L − 1).
    """

    policy: Tensor
    sampler: Tensor
    tokens: Tensor

    def measures(self) -> tuple[float, float, float, float]:
        """Total variation, KL(π ‖ q), E_π |π − q| and the policy's entropy, means over contexts."""
        p, q = self.policy.exp(), self.sampler.exp()
        gap = (p - q).abs()
        values = gap.sum(1) / 2, (p * (self.policy - self.sampler)).sum(1), (p * gap).sum(1), -(p * self.policy).sum(1)
        total_variation, kl, expected, entropy = (value.mean().item() for value in values)
        return total_variation, kl, expected, entropy


def first_order(trainer: DCGRPOTrainer, gradient_batch: Batch, contexts: Batch, follows: bool) -> dict[str, Change]:
    """The changes along each form, and along the reward's gradient without and with corrections.

    Args:
        trainer: at the weights that the question is about, with a replica and one optimizer step behind it at least.
            Its weights are put back.
        gradient_batch: completions of the replica.
        contexts: completions of the policy, of other problems.
        follows: whether the sampler takes the new weights over, quantized, as in a run without a lag.
    """
    directions: dict[str, Callable[[Tensor], Tensor]] = {
        "GRPO's reward": lambda logps: gradient_batch.advantages[:, None]
    }
    for name in ("token_truncate", "ppo_clip"):
        trust = trust_of(ConstraintSettings(rollout_correction=name))
        assert trust is not None
        directions[f"reward, {name}"] = _weighed(gradient_batch, trust)
    for form_name in FORMS:
        form = form_of(ConstraintSettings(constraint="static", constraint_form=form_name))
        assert form is not None
        directions[form_name] = _penalty(gradient_batch, form)
    assert trainer.replica is not None
    before = _distributions(trainer.model, trainer.replica.model, contexts)
    return {
        name: _change(trainer, gradient_batch, contexts, before, pull, follows) for name, pull in directions.items()
    }


def _weighed(batch: Batch, trust: Trust) -> Callable[[Tensor], Tensor]:
    return lambda logps: batch.advantages[:, None] * trust(logps, batch.infer_logps, batch.scored, batch.advantages)


def _penalty(batch: Batch, form: Form) -> Callable[[Tensor], Tensor]:
    """What a form alone adds to the advantages of tokens, for λ = 1."""
    return lambda logps: form(logps, batch.infer_logps, batch.scored, torch.zeros_like(batch.rewards), 1.0).advantages


def _change(
    trainer: DCGRPOTrainer,
    batch: Batch,
    contexts: Batch,
    before: _Distributions,
    pull: Callable[[Tensor], Tensor],
    follows: bool,
) -> Change:
    model, replica = trainer.model, trainer.replica
    assert replica is not None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logps = _token_logps(model, batch)
    weights = pull(logps.detach()) * batch.scored
    gradient = torch.autograd.grad((weights * logps).sum() / batch.scored.sum(), parameters)
    moments = trainer.optimizer.state
    steps = [g / (moments[p]["exp_avg_sq"].sqrt() + 1e-8) for p, g in zip(parameters, gradient, strict=True)]
    scale = MOVEMENT / max(_size(steps), 1e-30)
    for _ in range(3):  # the movement is nearly linear in the step: two corrections suffice
        with _moved(parameters, steps, scale):
            moved = _distance(_log_probs(model, contexts), before.policy)
        scale *= MOVEMENT / max(moved, 1e-30)
    with _moved(parameters, steps, scale):
        if follows:
            replica.sync(model, keep=True)
        after = _distributions(model, replica.model, contexts)
        if follows:
            replica.go_back()
    moved = _distance(after.policy, before.policy)
    drift = (after.tokens - before.tokens) * contexts.scored
    reward = ((contexts.rewards - contexts.rewards.mean()) * drift.sum(1)).mean().item()
    changes = [b - a for a, b in zip(before.measures(), after.measures(), strict=True)]
    return Change._make(change / moved for change in [*changes, reward])


@contextmanager
def _moved(parameters: Sequence[Tensor], steps: Sequence[Tensor], scale: float) -> Iterator[None]:
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, step in zip(parameters, steps, strict=True):
            parameter += scale * step
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _size(steps: Sequence[Tensor]) -> float:
    return torch.stack([step.norm() for step in steps]).norm().item()


def _token_logps(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Log-probabilities of the tokens that follow, shape (B, L − 1)."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attended.long()).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)


@torch.no_grad()
def _log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Log-probabilities of the whole vocabulary where a token of a completion follows, shape (N, V), float64."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attended.long()).logits[:, :-1]
    return logits[batch.scored].double().log_softmax(-1)


def _distance(first: Tensor, second: Tensor) -> float:
    """Total variation between distributions with these log-probabilities, shape (N, V); the mean over N."""
    return (first.exp() - second.exp()).abs().sum(1).mean().item() / 2


@torch.no_grad()
def _distributions(model: PreTrainedModel, sampler: PreTrainedModel, batch: Batch) -> _Distributions:
    return _Distributions(_log_probs(model, batch), _log_probs(sampler, batch), _token_logps(model, batch))


def sampled_batch(
    trainer: DCGRPOTrainer, rows: Sequence[Mapping], reward: Callable[..., list], by_policy: bool, completions: int
) -> Batch:
    """Samples completions of problems at temperature 1.

    Args:
        trainer: with a replica.
        rows: problems with conversational prompts, and the columns that the reward reads.
        reward: called as TRL calls it.
        by_policy: whether the policy samples (transformers' `generate`), or the replica.
        completions: for each problem.
    """
    tokenizer, replica = trainer.processing_class, trainer.replica
    assert replica is not None
    repeated = [row for row in rows for _ in range(completions)]
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in repeated
    ]
    config = completion_config(trainer, temperature=1.0, top_k=0)
    if by_policy:
        ends = set(trainer.eos_token_ids)
        sampled = [_until_end(ids, ends) for ids in policy_completions(trainer, prompts, config)]
        logps = [[0.0] * len(ids) for ids in sampled]
    else:
        sampled, logps = replica.generate(prompts, config, 1.0)
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    columns = {name: [row[name] for row in repeated] for name in repeated[0] if name != "prompt"}
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = torch.tensor(reward(completions=conversations, **columns), dtype=torch.float32)
    groups = rewards.view(-1, completions)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    whole = [torch.tensor(prompt + ids) for prompt, ids in zip(prompts, sampled, strict=True)]
    places = [torch.arange(len(row)) >= len(prompt) for row, prompt in zip(whole, prompts, strict=True)]
    of_tokens = [torch.tensor([0.0] * len(prompt) + row) for prompt, row in zip(prompts, logps, strict=True)]
    return Batch(
        ids=pad_sequence(whole, batch_first=True, padding_value=tokenizer.pad_token_id),
        attended=pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in whole], batch_first=True),
        scored=pad_sequence(places, batch_first=True)[:, 1:],
        infer_logps=pad_sequence(of_tokens, batch_first=True)[:, 1:],
        rewards=rewards,
        advantages=advantages.flatten(),
    )


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """Up to and with the first end token."""
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids
