"""Greedy completions of a trainer's policy as it is deployed, by its own engine and at its present weights."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ..grading.totals import finite_totals


def greedy_completion_ids(trainer: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
    """See `DCGRPOTrainer.deployed_completion_ids`."""
    trainer.sampler.bring_weights(training=False)
    if trainer.replica is not None:
        config = GenerationConfig(
            max_new_tokens=trainer.max_completion_length,
            pad_token_id=trainer._tokenizer.pad_token_id,
            eos_token_id=trainer.eos_token_ids,
            do_sample=False,
        )
        return trainer.replica.generate(prompt_ids, config, 1.0)[0]
    if not trainer.use_vllm:
        raise ValueError("deployment_scheme=None and use_vllm=False: set one, so that an engine answers.")
    generation = trainer.vllm_generation
    of_training, generation.temperature = generation.temperature, 0.0
    try:
        return generation.generate(prompts=prompt_ids, images=None, num_generations=1)[1]
    finally:
        generation.temperature = of_training


def greedy_completions(trainer: Any, prompts: list) -> tuple[list, list[list[int]]]:
    """Return the completions of `DCGRPOTrainer.deployed_completions`, and their token ids."""
    if trainer.tools:
        raise ValueError(
            "deployed_completions and deployed_rewards sample one turn, and this trainer has tools or an "
            "environment_factory, which need several turns: use evaluate(), which samples all turns."
        )
    completion_ids = greedy_completion_ids(trainer, trainer._tokenize_prompts(prompts)[0])
    texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    if isinstance(prompts[0], str):
        return texts, completion_ids
    return [[{"role": "assistant", "content": text}] for text in texts], completion_ids


def weighted_rewards(trainer: Any, rewards: Tensor) -> list[float | None]:
    """Return the weighted sums of this process's completions; None where no function scored one.

    Args:
        trainer: trainer whose rewards they are.
        rewards: of the completions of all processes, shape (N, functions), NaN where there is none.
    """
    totals = finite_totals(rewards, trainer.reward_weights, trainer.reward_funcs, trainer.reward_func_names)
    own = totals.view(trainer.accelerator.num_processes, -1)[trainer.accelerator.process_index]
    return [None if math.isnan(value) else value for value in own.tolist()]
