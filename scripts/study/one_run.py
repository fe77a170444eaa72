"""One run of the study: `dc-trl train`. A small policy is measured as it is trained, beside as it is deployed."""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from shared_prompts import SharedPrompts
from transformers import GenerationConfig, TrainerCallback

from dc_trl import DCGRPOTrainer
from dc_trl.command.train import train


_LARGE = 10_000  # tokens of a vocabulary


class TrainedPolicyCallback(TrainerCallback):
    """Logs `eval_trained_greedy_reward` at evaluations after the first step: transformers' `generate`, no engine.

    For small models in one process, as the study trains them.

    Args:
        trainer: with held-out problems and one reward function.
    """

    def __init__(self, trainer: DCGRPOTrainer):
        self._trainer = trainer

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == 0:
            return  # the same in every run of one model
        rows = list(self._trainer.eval_dataset)
        size = args.per_device_eval_batch_size
        rewards: list[float] = []
        for begin in range(0, len(rows), size):
            rewards += self._rewards(rows[begin : begin + size])
        self._trainer.log({"eval_trained_greedy_reward": statistics.fmean(rewards)})

    def _rewards(self, rows: list[dict[str, Any]]) -> list[float]:
        trainer = self._trainer
        ids = policy_completions(trainer, prompt_ids(trainer, rows), completion_config(trainer))
        return rewards_of(trainer, trainer.reward_funcs[0], rows, ids)


def prompt_ids(trainer: DCGRPOTrainer, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of plain or conversational prompts."""
    return trainer._tokenize_prompts([row["prompt"] for row in rows])[0]


def rewards_of(
    trainer: DCGRPOTrainer, reward: Any, rows: Sequence[dict[str, Any]], completion_ids: list[list[int]]
) -> list[float]:
    """Return a reward for each completion; the function is called as TRL calls it, with the columns of the rows."""
    completions: list = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    return reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)


def completion_config(trainer: DCGRPOTrainer, **sampling: Any) -> GenerationConfig:
    """Return how completions end; they are greedy, or sampled as `sampling` says."""
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
    """Return token ids of one completion for each prompt, padded at their ends, by the policy's own `generate`."""
    padded = trainer.processing_class.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
    sequences = trainer.model.generate(**padded.to(trainer.accelerator.device), generation_config=config)
    return sequences[:, padded["input_ids"].shape[1] :].tolist()


def measured(trainer: DCGRPOTrainer) -> TrainerCallback:
    """Return the callback of a run; the toy's runs keep their bits.

    The forwards of a large model share prompts. Its policy is measured as it is deployed alone: greedy completions in
    float32 are a ninth of a run, and no question of its study is about them.
    """
    if trainer.model.config.vocab_size > _LARGE:
        trainer.parts.insert(0, SharedPrompts(trainer))
        return TrainerCallback()
    return TrainedPolicyCallback(trainer)


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], measured))
