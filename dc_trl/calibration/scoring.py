"""Log-probabilities of completions under the model that is trained, computed as TRL does."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor
from tqdm.auto import tqdm
from trl.trainer.utils import add_fused_lm_head, pad

from .result import CalibrationSettings
from .rollouts import Policy, Rollout


@torch.no_grad()
def train_logps(
    policy: Policy, prompts: Sequence[list[int]], rollouts: Sequence[Rollout], settings: CalibrationSettings
) -> list[Tensor]:
    """Return log π_train of each rollout's tokens, as TRL's trainer computes it.

    The forward is the one of training: prompts padded on the left, completions on the right, under autocast where the
    run has `bf16: true`, with TRL's fused output head, which takes the softmax in float32 and holds the logits of at
    most 4,096 tokens × 32,768 words at a time. Peak memory above the weights: those logits, 2 GB or less, and one
    layer's activations of `batch_tokens` tokens.

    Returns:
        A float32 tensor of shape (tokens,) for each rollout, on the CPU.
    """
    logps = [torch.empty(0) for _ in rollouts]
    # Completions of similar length share a forward, so that little of it is padding.
    order = sorted(range(len(rollouts)), key=lambda number: -len(rollouts[number].ids))
    base = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    was_training, own_forward = policy.training, base.__dict__.get("forward")
    add_fused_lm_head(base, temperature=settings.temperature)
    policy.eval()
    try:
        # One pass of many leaves no bar behind.
        with tqdm(
            total=len(rollouts), unit="completion", desc="scoring", leave=False, disable=not settings.progress
        ) as bar:
            while order:
                longest = max(map(len, prompts)) + len(rollouts[order[0]].ids)
                size = max(1, settings.batch_tokens // longest)
                batch, order = order[:size], order[size:]
                scored = _forward(policy, prompts, [rollouts[number] for number in batch], settings)
                for number, values in zip(batch, scored, strict=True):
                    logps[number] = values
                bar.update(len(batch))
    finally:
        policy.train(was_training)
        del base.forward
        if own_forward is not None:
            base.forward = own_forward
    return logps


def _forward(
    policy: Policy, prompts: Sequence[list[int]], rollouts: Sequence[Rollout], settings: CalibrationSettings
) -> list[Tensor]:
    """Score rollouts in one batch as TRL lays it out: prompts padded on the left, completions on the right."""
    device = policy.device
    before = [torch.tensor(prompts[rollout.prompt]) for rollout in rollouts]
    after = [torch.tensor(rollout.ids) for rollout in rollouts]
    prompt_ids, completion_ids = pad(before, padding_side="left"), pad(after)
    prompt_mask = pad([torch.ones_like(ids) for ids in before], padding_side="left")
    completion_mask = pad([torch.ones_like(ids) for ids in after])
    attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)
    inputs = {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": attention_mask,
        "labels": torch.cat([torch.full_like(prompt_ids, -100), pad(after, -100)], dim=1),
    }
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.bf16):
        output = policy(**{name: tensor.to(device) for name, tensor in inputs.items()}, fused_lm_head=True)
    values = output.log_probs[:, -completion_ids.shape[1] :].float().cpu()
    return [values[row, : len(rollout.ids)].clone() for row, rollout in enumerate(rollouts)]


@torch.no_grad()
def completion_log_probs(model: Policy, prompt: list[int], completion: list[int], bf16: bool = False) -> Tensor:
    """Return log-probabilities of the vocabulary at each token of a completion: (tokens, vocabulary), float32, nats.

    The forward reads prompt and completion as one row, under bfloat16 autocast with `bf16`. The result is on the CPU.
    """
    row = torch.tensor([prompt + completion], device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(input_ids=row, use_cache=False, logits_to_keep=len(completion) + 1).logits
    return logits[0, :-1].float().log_softmax(-1).cpu()
