"""Evaluation while training: by the engine of the rollouts, at the present weights, under names of its own."""

import json
import statistics

import pytest
from datasets import Dataset

from dc_trl.callbacks.before_and_after import greedy_rewards

from .helpers import (
    TWO_PROCESSES,
    distinct_characters,
    logged,
    make_prompts,
    make_trainer,
    read_json,
    succeed,
    takes_minutes,
    tiny_model,
)


def tiny_trainer(output_dir, reward=None, **overrides):
    options = {"deployment_scheme": "fp8", "max_completion_length": 24, "eval_dataset": make_prompts(4)} | overrides
    return make_trainer(output_dir, tiny_model(), reward, **options)


@takes_minutes
def test_two_processes_evaluate_as_one(tmp_path):
    """Eleven problems in batches of four: the last batch of the second process has one that counts."""
    trainer = tiny_trainer(tmp_path / "one", distinct_characters)
    expected = greedy_rewards(trainer, make_prompts(11), 4)
    options = {"output_dir": str(tmp_path / "two"), "max_steps": 1, "benchmark": 11, "use_cpu": True}
    options |= {"per_device_train_batch_size": 2, "deployment_scheme": "fp8", "max_completion_length": 24}
    succeed([*TWO_PROCESSES, "-m", "tests.worker", json.dumps(options)])
    assert len(expected) == 11
    assert sorted(read_json(tmp_path / "two" / "greedy.json")) == pytest.approx(sorted(expected))


def with_columns():
    return make_prompts(6).add_column("bonus", [float(number) for number in range(6)])


def by_everything(prompts, completions, completion_ids, bonus, trainer_state, log_extra, log_metric, **kwargs):
    """A reward that needs what TRL passes."""
    assert trainer_state.global_step == 0
    log_extra("bonus", bonus)
    log_metric("bonus", 1.0)
    rows = zip(prompts, completions, completion_ids, bonus, strict=True)
    return [
        None if value == 2.0 else len(prompt) + 10 * len(text) + 100 * len(ids) + 1000 * value
        for prompt, text, ids, value in rows
    ]


def by_hand(trainer, dataset):
    """What `by_everything` has to give for each problem, from the trainer's own greedy completions one by one."""
    values = []
    for prompt, bonus in zip(dataset["prompt"], dataset["bonus"], strict=True):
        (ids,) = trainer.deployed_completion_ids([trainer.processing_class(prompt)["input_ids"]])
        text = trainer.processing_class.decode(ids, skip_special_tokens=True)
        values.append(len(prompt) + 10 * len(text) + 100 * len(ids) + 1000 * bonus)
    return values


def test_greedy_rewards_are_the_weighted_sums_of_the_runs_own(tmp_path):
    async def only_some(prompts, bonus, **kwargs):
        return [None if value < 3 else 4.0 for value in bonus]

    rewards, columns = [by_everything, only_some], with_columns()
    data = {"train_dataset": columns, "eval_dataset": columns}
    trainer = tiny_trainer(tmp_path, rewards, reward_weights=[0.5, 2.0], **data)
    totals = [0.5 * value + 8.0 * (number >= 3) for number, value in enumerate(by_hand(trainer, with_columns()))]
    del totals[2]  # no function scored it
    assert greedy_rewards(trainer, with_columns(), 4) == pytest.approx(totals, rel=0.02)
    # What the functions log goes to no table of rollouts.
    assert not trainer._pending_extra_logs
    assert not trainer._pending_metrics


def test_several_evaluation_sets_keep_their_own_metrics(tmp_path):
    def prompt_length(prompts, **kwargs):
        return [float(len(prompt)) for prompt in prompts]

    sets = {
        "short": Dataset.from_dict({"prompt": ["1", "22"]}),
        "long": Dataset.from_dict({"prompt": ["4444", "55555", "666666"]}),
    }
    options = {"deployment_scheme": "fp8", "eval_steps": 1, "max_steps": 1}
    trainer = make_trainer(tmp_path, None, prompt_length, eval_dataset=sets, **options)
    trainer.train()
    for name, rows in sets.items():
        expected = statistics.mean(map(len, rows["prompt"]))
        assert logged(trainer, f"eval_{name}_reward") == [pytest.approx(expected)]
        assert len(logged(trainer, f"eval_{name}_discrepancy/mean")) == 1
    assert not logged(trainer, "eval_reward")
    metrics = trainer.evaluate(sets["short"])
    assert metrics["eval_reward"] == pytest.approx(1.5)
