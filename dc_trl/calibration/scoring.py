"""Log-probabilities of completions under the model that is trained, as TRL computes them."""

from collections.abc import Iterator, Sequence

import torch
from peft import PeftModel
from torch import Tensor
from tqdm.auto import tqdm
from trl.trainer.utils import add_fused_lm_head

from .rollouts import Policy, Rollout
from .settings import CalibrationSettings


@torch.no_grad()
def train_logps(
    policy: Policy, prompts: Sequence[list[int]], rollouts: Sequence[Rollout], settings: CalibrationSettings
) -> list[Tensor]:
    """log π_train of each rollout's tokens, as TRL's trainer computes it.

    The forward is the one of training: prompts padded on the left, completions on the right, under autocast where the
    run has `bf16: true`, with TRL's fused output head, which takes the softmax in float32 and holds the logits of at
    most 4,096 tokens × 32,768 words at a time. Peak memory above the weights: those logits, 2 GB or less, and one
    layer's activations of `batch_tokens` tokens.

    Args:
        policy: in its training precision.
        prompts, rollouts: token ids, and completions of them.
        settings: temperature, autocast, tokens of a forward.

    Returns:
        A float32 tensor of shape (tokens,) for each rollout, on the CPU.
    """
    logps = [torch.empty(0) for _ in rollouts]
    # Neighbours in length share a forward, so that little of it is padding.
    order = sorted((i for i, r in enumerate(rollouts) if r.ids), key=lambda i: len(rollouts[i].ids))
    total = sum(len(rollout.ids) for rollout in rollouts)
    base = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    was_training, own_forward = policy.training, base.__dict__.get("forward")
    add_fused_lm_head(base, temperature=settings.temperature)
    policy.eval()
    try:
        with tqdm(total=total, unit="token", desc="scoring", disable=not settings.progress) as bar:
            for batch in _batches(order, prompts, rollouts, settings.batch_tokens):
                parts = [(prompts[rollouts[i].prompt], rollouts[i].ids) for i in batch]
                for i, values in zip(batch, _forward(policy, parts, settings.bf16), strict=True):
                    logps[i] = values
                    bar.update(len(values))
    finally:
        policy.train(was_training)
        del base.forward
        if own_forward is not None:
            base.forward = own_forward
    return logps


def _batches(
    order: Sequence[int], prompts: Sequence[list[int]], rollouts: Sequence[Rollout], batch_tokens: int
) -> Iterator[list[int]]:
    batch: list[int] = []
    prompt = completion = 0
    for i in order:
        prompt = max(prompt, len(prompts[rollouts[i].prompt]))
        completion = max(completion, len(rollouts[i].ids))
        if batch and (len(batch) + 1) * (prompt + completion) > batch_tokens:
            yield batch
            batch, prompt, completion = [], len(prompts[rollouts[i].prompt]), len(rollouts[i].ids)
        batch.append(i)
    if batch:
        yield batch


def _forward(policy: Policy, parts: list[tuple[list[int], list[int]]], bf16: bool) -> list[Tensor]:
    width = max(len(prompt) for prompt, _ in parts)
    height = max(len(completion) for _, completion in parts)
    input_ids = torch.zeros(len(parts), width + height, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, completion) in enumerate(parts):
        span = slice(width - len(prompt), width + len(completion))
        input_ids[row, span] = torch.tensor(prompt + completion)
        attention_mask[row, span] = 1
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :width] = -100
    device = policy.device
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        output = policy(**{name: tensor.to(device) for name, tensor in inputs.items()}, fused_lm_head=True)
    values = output.log_probs[:, -height:].float().cpu()
    return [values[row, : len(completion)].clone() for row, (_, completion) in enumerate(parts)]
