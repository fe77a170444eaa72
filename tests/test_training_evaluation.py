"""Evaluation while training: by the engine of the rollouts, at the present weights, under names of its own."""

import asyncio
import json
import math
import statistics
import subprocess

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from transformers.integrations.integration_utils import rewrite_logs

from dc_trl.callbacks.benchmarks import BenchmarkCallback, greedy_rewards
from dc_trl.evaluation import Benchmark, evaluate
from dc_trl.rollouts.replica import Replica
from dc_trl.rollouts.sampling import ReplicaEngine, Sampling

from .helpers import (
    ROOT,
    TINY_MODEL,
    TWO_PROCESSES,
    logged,
    make_prompts,
    make_tokenizer,
    make_trainer,
)


def tiny_model():
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)


def tiny_trainer(output_dir, reward=None, **overrides):
    options = {"deployment_scheme": "fp8", "max_completion_length": 48, "eval_dataset": make_prompts(4)} | overrides
    return make_trainer(output_dir, tiny_model(), reward, **options)


def greedy_reference(output_dir, benchmark):
    """The same problems by `evaluate`, on a replica of its own."""
    tokenizer = make_tokenizer()
    engine = ReplicaEngine(Replica(tiny_model(), "fp8"), tokenizer)
    options = {"sampling": Sampling(48, 0.0), "grading_processes": 1, "progress": False}
    return evaluate("tiny", "fp8", engine, tokenizer, [benchmark], output_dir, **options).results[benchmark.name]


@pytest.mark.long
def test_benchmarks_are_evaluated_with_the_trainers_evaluation(tmp_path):
    benchmark = Benchmark.load("arithmetic", samples=2, limit=24)
    other = Benchmark("other", benchmark.rows.select(range(5)), 1, None)
    trainer = tiny_trainer(tmp_path / "run", eval_strategy="steps", eval_steps=2, max_steps=2, learning_rate=3e-3)
    callback = BenchmarkCallback(trainer, [benchmark, other], temperature=0.0, batch_size=7, grading_processes=1)
    trainer.add_callback(callback)
    trainer.evaluate()
    (before,) = (row for row in trainer.state.log_history if "eval_arithmetic/avg@2" in row)
    trainer.train()
    (after,) = (row for row in trainer.state.log_history if "eval_arithmetic/avg@2" in row)
    expected = greedy_reference(tmp_path / "reference", benchmark)
    assert before["eval_arithmetic/avg@2"] == pytest.approx(expected.avg.value, abs=0.05)
    assert before["eval_arithmetic/mean_tokens"] == pytest.approx(expected.mean_tokens, rel=0.05)
    assert before["eval_arithmetic/maj@2"] == before["eval_arithmetic/avg@2"]  # greedy: both samples are the same
    assert before["eval_arithmetic/avg@2_se"] > 0
    assert after["step"] == 2
    assert len(logged(trainer, "eval_other/avg@1")) == 1
    assert "eval/arithmetic/avg@2" in rewrite_logs(after)
    # Neither the constraint nor the trainer's own evaluation heard of it.
    assert len(logged(trainer, "eval_reward")) == 1
    assert len(logged(trainer, "discrepancy/mean")) == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_processes_evaluate_as_one(tmp_path):
    benchmark = Benchmark.load("arithmetic", samples=1, limit=11)
    expected = greedy_reference(tmp_path / "reference", benchmark)
    options = {"output_dir": str(tmp_path / "two"), "max_steps": 1, "benchmark": 11, "use_cpu": True}
    options |= {"per_device_train_batch_size": 2, "deployment_scheme": "fp8", "max_completion_length": 48}
    options["learning_rate"] = 0.0  # evaluated after the step, the policy is still the shipped one
    command = [*TWO_PROCESSES, "-m", "tests.worker", json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "two" / "logs.json").read_text())["rows"]
    (row,) = (row for row in rows if "eval_arithmetic/avg@1" in row)
    assert row["eval_arithmetic/avg@1"] == pytest.approx(expected.avg.value, abs=0.1)
    assert row["eval_arithmetic/mean_tokens"] == pytest.approx(expected.mean_tokens, rel=0.1)


def with_columns(count=6):
    return make_prompts(count).add_column("bonus", [float(number) for number in range(count)])


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


def test_deployed_rewards_call_a_reward_as_trl_does(tmp_path):
    trainer, rows = tiny_trainer(tmp_path), list(with_columns())
    values = [value for number, value in enumerate(by_hand(trainer, with_columns())) if number != 2]

    async def asynchronous(**arguments):
        await asyncio.sleep(0)
        return by_everything(**arguments)

    async def in_a_notebook():
        return trainer.deployed_rewards(rows, asynchronous)

    found = [trainer.deployed_rewards(rows, reward) for reward in (by_everything, asynchronous)]
    found.append(asyncio.run(in_a_notebook()))  # within a running event loop
    for rewards in found:
        assert rewards.pop(2) is None
        assert rewards == pytest.approx(values, rel=0.02)
    with pytest.raises(ValueError, match="returned 1 rewards for 6 completions: return one for each"):
        trainer.deployed_rewards(rows, lambda **kwargs: [1.0])
    assert trainer.deployed_rewards(rows, lambda prompts, **kwargs: [math.nan] * len(prompts)) == [None] * 6


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
    options = {"deployment_scheme": "fp8", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = make_trainer(tmp_path, None, prompt_length, eval_dataset=sets, **options)
    trainer.train()
    for name, rows in sets.items():
        expected = statistics.mean(map(len, rows["prompt"]))
        assert logged(trainer, f"eval_{name}_reward") == [pytest.approx(expected)]
        assert len(logged(trainer, f"eval_{name}_discrepancy/mean")) == 1
    assert not logged(trainer, "eval_reward")
    metrics = trainer.evaluate(sets["short"])
    assert metrics["eval_reward"] == pytest.approx(1.5)
