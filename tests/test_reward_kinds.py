"""Rewards of every kind that TRL takes, in one training: their sum by hand, in training and in evaluation."""

import pytest
import torch

from .helpers import (
    Rollouts,
    logged,
    make_prompts,
    make_tokenizer,
    make_trainer,
    reward_model,
)


def test_functions_that_wait_abstain_or_are_models_are_summed_by_their_weights(tmp_path):
    tokenizer, model, seen = make_tokenizer(), reward_model(), []

    async def waits(completions, **kwargs):
        return [len(text) / 10 for text in completions]

    def abstains(prompts, completions, trainer_state, log_metric, **kwargs):
        log_metric("abstained", 0.5)
        values = [None if len(text) % 2 else 1.0 for text in completions]
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        with torch.no_grad():
            ids = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
            scores = [model(**each).logits.item() for each in ids]
        seen.append(
            [0.5 * len(c) / 10 + (v or 0) + 2 * s for c, v, s in zip(completions, values, scores, strict=True)]
        )
        return values

    evaluated = {"eval_steps": 2, "per_device_eval_batch_size": 8, "num_generations_eval": 2}
    evaluated["eval_dataset"] = {"easy": make_prompts(4), "hard": make_prompts(8).select(range(4, 8))}
    weighted = {"reward_weights": [0.5, 1.0, 2.0], "reward_processing_classes": [None, None, make_tokenizer()]}
    rewards = [waits, abstains, model]
    trainer = make_trainer(tmp_path, None, rewards, max_steps=2, rollout_func=Rollouts(), **evaluated, **weighted)
    trainer.train()
    means = [sum(values) / len(values) for values in seen]
    assert [len(values) for values in seen] == [4, 4, 8, 8]
    assert logged(trainer, "reward") == pytest.approx(means[:2], abs=1e-4)
    assert logged(trainer, "eval_easy_reward") == pytest.approx(means[2:3], abs=1e-4)
    assert logged(trainer, "eval_hard_reward") == pytest.approx(means[3:], abs=1e-4)
    assert logged(trainer, "abstained") == [0.5, 0.5]
