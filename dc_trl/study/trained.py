"""The policy that trains, measured beside the one that is deployed: what quantization costs it."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, TrainerCallback

from ..settings.reward_functions import call_reward
from ..trainer import DCGRPOTrainer


class TrainedPolicyCallback(TrainerCallback):
    """Logs `eval_trained_greedy_reward` at evaluations after the first step: transformers' `generate`, no engine.

    For small models in one process, as studies train them.

    Args:
        trainer: with held-out problems whose prompts are conversational or plain, and one reward function.
    """

    def __init__(self, trainer: DCGRPOTrainer):
        self._trainer = trainer

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == 0:
            return  # the same in every run of one model
        rows = list(self._trainer.eval_dataset)
        size = args.per_device_eval_batch_size
        rewards: list[float | None] = []
        for begin in range(0, len(rows), size):
            rewards += self._rewards(rows[begin : begin + size])
        mean = statistics.fmean(reward for reward in rewards if reward is not None)
        self._trainer.log({"eval_trained_greedy_reward": mean})

    def _rewards(self, rows: list[dict[str, Any]]) -> list[float | None]:
        trainer = self._trainer
        tokenizer, prompts = trainer.processing_class, [row["prompt"] for row in rows]
        if isinstance(prompts[0], str):
            encoded = tokenizer(prompts, add_special_tokens=False)
        else:
            encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)
        ids = policy_completions(trainer, encoded["input_ids"], completion_config(trainer))
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        plain = isinstance(prompts[0], str)
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        return call_reward(
            trainer.reward_funcs[0],
            prompts=prompts,
            completions=texts if plain else [[{"role": "assistant", "content": text}] for text in texts],
            completion_ids=ids,
            **columns,
        )


def completion_config(trainer: DCGRPOTrainer, **sampling: Any) -> GenerationConfig:
    """How completions end; greedy ones, or as `sampling` says."""
    return GenerationConfig(
        max_new_tokens=trainer.max_completion_length,
        do_sample=bool(sampling),
        pad_token_id=trainer.processing_class.pad_token_id,
        eos_token_id=trainer.eos_token_ids,
        **sampling,
    )


@torch.inference_mode()
def policy_completions(
    trainer: DCGRPOTrainer, prompt_ids: Sequence[list[int]], config: GenerationConfig
) -> list[list[int]]:
    """Token ids of one completion for each prompt, padded at their ends, by the policy's own `generate`."""
    padded = trainer.processing_class.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
    sequences = trainer.model.generate(**padded.to(trainer.accelerator.device), generation_config=config)
    return sequences[:, padded["input_ids"].shape[1] :].tolist()
