"""Advantages from rewards: against definitions written out, and in the trainer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from dc_trl.grading.totals import finite_totals, zero_std_groups

from .helpers import Rollouts, assert_same_weights, logged, make_experts, make_prompts, make_trainer


NAN = math.nan
rewards_of_a_group = st.lists(st.one_of(st.just(NAN), st.integers(-3, 3).map(float)), min_size=4, max_size=4)


def test_total_by_hand():
    rewards = torch.tensor([[1.0, 0.5], [NAN, 2.0], [NAN, NAN]])
    total = finite_totals(rewards, torch.tensor([1.0, 10.0]), [len, len], ["a", "b"])
    assert total[:2].tolist() == [6.0, 20.0]
    assert math.isnan(total[2])


@given(st.lists(rewards_of_a_group, min_size=1, max_size=4))
def test_groups_without_spread(groups):
    found = zero_std_groups(torch.tensor(groups).flatten(), 4)
    expected = [len({r for r in group if not math.isnan(r)}) < 2 for group in groups for _ in range(4)]
    assert found.tolist() == expected


# --- in the trainer


def train(tmp_path, reward, rollouts=None, model=None, peft_config=None, **fields):
    fields = {"max_steps": 1, "per_device_train_batch_size": 16, "learning_rate": 0.0} | fields
    fields |= {"rollout_func": rollouts or Rollouts(), "peft_config": peft_config}
    trainer = make_trainer(tmp_path, model, reward, **fields)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("loss_type", "constraint"), [("dr_grpo", "none"), ("dapo", "static")])
def test_dropped_groups_leave_a_batch_of_the_others(tmp_path, tokenizer, seen_by_the_loss, loss_type, constraint):
    compare_with_the_kept_alone(tmp_path, tokenizer, seen_by_the_loss, loss_type=loss_type, constraint=constraint)


def test_entropy_bonus_and_kl_of_the_kept_are_as_in_a_batch_of_their_own(tmp_path, tokenizer, seen_by_the_loss):
    """The bonus is a mean over tokens already; KL is part of the mean over completions."""
    fields = {"loss_type": "grpo", "constraint": "static", "entropy_coef": 0.5, "beta": 0.3}
    # Random adapters, so that policy and reference (the model without them) differ.
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    dropped, _ = compare_with_the_kept_alone(tmp_path, tokenizer, seen_by_the_loss, peft_config=adapter, **fields)
    assert logged(dropped, "kl")[0] > 0.01


def compare_with_the_kept_alone(tmp_path, tokenizer, seen_by_the_loss, peft_config=None, **fields):
    """The loss, its gradient and δ̄ equal those of a batch that holds nothing but the groups with a spread."""

    def rewards(completions, prompts, **kwargs):
        # Every other prompt's completions all get the same reward.
        numbers = [int(prompt.split("+")[0]) for prompt in prompts]
        return [len(c) % 5 if number % 2 else 1.0 for c, number in zip(completions, numbers, strict=True)]

    fields |= {"scale_rewards": "none", "max_completion_length": 8}
    shuffle = {"shuffle_dataset": False}
    torch.manual_seed(0)  # of the adapters
    dropped = train(tmp_path / "a", rewards, peft_config=peft_config, drop_zero_std_groups=True, **fields, **shuffle)
    (inputs,) = seen_by_the_loss
    kept = inputs["completion_mask"].any(-1)
    prompts = zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)
    odd = [int(tokenizer.decode(ids[mask]).split("+")[0]) % 2 for ids, mask in prompts]
    assert kept.tolist() == [bool(number) for number in odd]
    assert 0 < kept.sum() < 16

    # The reference: the kept completions alone, in a batch of half the size.
    calls = []

    class Kept(Rollouts):
        def __call__(self, prompts, trainer):
            output = super().__call__(prompts, trainer)
            # Position decides what `Rollouts` returns: take what the odd prompts had in the batch of 16.
            whole = Rollouts()(["0+0="] * 16, trainer)
            position = {1: 4, 3: 12}
            for i, prompt in enumerate(prompts):
                source = position[int(prompt.split("+")[0])] + i % 4
                for name in ("completion_ids", "logprobs"):
                    output[name][i] = whole[name][source]
            calls.append(prompts)
            return output

    prompts = make_prompts(4).filter(lambda row: int(row["prompt"].split("+")[0]) % 2 == 1)
    fields |= shuffle | {"train_dataset": prompts, "per_device_train_batch_size": 8}
    torch.manual_seed(0)
    alone = train(tmp_path / "b", rewards, Kept(), peft_config=peft_config, **fields)
    assert len(calls) == 1
    assert logged(dropped, "loss") == pytest.approx(logged(alone, "loss"), abs=1e-6)
    assert logged(dropped, "grad_norm") == pytest.approx(logged(alone, "grad_norm"), rel=1e-4)
    assert logged(dropped, "discrepancy/mean") == pytest.approx(logged(alone, "discrepancy/mean"), rel=1e-5)
    return dropped, alone


def test_a_batch_of_nothing_else_moves_nothing(tmp_path):
    """Not by the auxiliary loss of a router either."""

    def same(completions, **kwargs):
        return [1.0] * len(completions)

    fields = {"learning_rate": 1e-2, "max_steps": 2, "entropy_coef": 0.1}
    fields |= {"router_aux_loss_coef": 0.1}
    trainer = train(tmp_path, same, model=make_experts(), drop_zero_std_groups=True, **fields)
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert logged(trainer, "entropy") == [None, None]  # and not TRL's 0, which would look like a collapse
    assert trainer.lagrange_multiplier.value == 0.1
    assert_same_weights(trainer.model, make_experts())


def test_groups_of_equal_sums_are_kept_where_each_function_is_normalised(tmp_path, seen_by_the_loss):
    """1, 0, 1, 0 and half of 0, 2, 0, 2: normalised one by one, their weighted sums are ±0.5."""

    def first(completions, **kwargs):
        return [float(number % 2 == 0) for number in range(len(completions))]

    def second(completions, **kwargs):
        return [2.0 * (number % 2) for number in range(len(completions))]

    fields = {"drop_zero_std_groups": True, "reward_weights": [1.0, 0.5], "constraint": "none"}
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        train(tmp_path, [first, second], multi_objective_aggregation=aggregation, **fields)
    dropped, kept = seen_by_the_loss
    assert not dropped["completion_mask"].any()
    assert kept["completion_mask"].any(-1).all()
    assert kept["advantages"].abs().min() > 0.5


def test_a_group_is_kept_where_one_function_differs_of_those_that_are_normalised(tmp_path, seen_by_the_loss):
    def same(completions, **kwargs):
        return [1.0] * len(completions)

    def differs(completions, **kwargs):
        return [float(number % 4 == 0 and number < 8) for number in range(len(completions))]

    fields = {"drop_zero_std_groups": True, "shuffle_dataset": False, "constraint": "none"}
    train(tmp_path, [same, differs], multi_objective_aggregation="normalize_then_sum", **fields)
    (inputs,) = seen_by_the_loss
    kept = inputs["completion_mask"].any(-1)
    assert kept.sum() == 8  # the first two of four groups
    assert (inputs["advantages"][kept] != 0).all()


def test_the_auxiliary_loss_of_a_router_keeps_its_size(tmp_path):
    """One group of four is kept. Advantages of a group sum to zero, so at equal weights the rest of the loss is 0."""

    def one_differs(completions, **kwargs):
        return [float(i == 0) for i in range(len(completions))]

    fields = {"drop_zero_std_groups": True, "constraint": "none", "router_aux_loss_coef": 0.1}
    trainer = train(tmp_path, one_differs, model=make_experts(), **fields)
    assert logged(trainer, "aux_loss")[0] > 0.1
    assert logged(trainer, "loss")[0] == pytest.approx(0.1 * logged(trainer, "aux_loss")[0], rel=1e-4)
