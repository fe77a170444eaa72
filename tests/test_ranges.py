"""Numbers that a setting may be: the ranges against their plain meaning, and every number of a configuration."""

import math
import types
from dataclasses import fields
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig

from dc_trl import DCGRPOConfig
from dc_trl.settings.ranges import TRAINING, Range

from .helpers import make_config


bounds = st.none() | st.integers(-3, 3)
numbers = (
    st.integers(-5, 5) | st.floats(allow_nan=True, allow_infinity=True) | st.booleans() | st.sampled_from([10**400])
)


@given(bounds, bounds, bounds, bounds, st.booleans(), st.booleans(), numbers)
def test_a_range_holds_what_it_says(least, above, most, below, whole, infinite, value):
    expected = not isinstance(value, bool)
    expected &= isinstance(value, int) if whole else True
    expected &= not (isinstance(value, float) and math.isnan(value)) and value != -math.inf and value != 10**400
    expected &= infinite or value != math.inf
    expected &= least is None or value >= least
    expected &= above is None or value > above
    expected &= most is None or value <= most
    expected &= below is None or value < below
    assert Range(least, above, most, below, whole, infinite).allows(value) == expected


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5)])
def test_numbers_of_numpy_are_numbers(value):
    assert Range(least=0).allows(value)
    assert Range(least=1, whole=True).allows(np.int64(3))
    assert not Range(whole=True).allows(value)
    assert not Range().allows("0.5")
    assert not Range().allows(None)


def test_every_number_of_the_configuration_has_a_range():
    hints = get_type_hints(DCGRPOConfig)
    kinds = {field.name: set(get_args(hints[field.name]) or [hints[field.name]]) for field in fields(DCGRPOConfig)}
    of_numbers = {name for name, kind in kinds.items() if kind <= {int, float, types.NoneType}}
    assert {"learning_rate", "max_steps", "lambda_lr", "eval_steps"} < of_numbers
    assert of_numbers == set(TRAINING)


def test_what_trl_and_the_paper_take_by_default_is_allowed(tmp_path):
    for settings in (make_config(tmp_path), DCGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)):
        for name, allowed in TRAINING.items():
            value = getattr(settings, name)
            assert value is None or allowed.allows(value), name
    for field in fields(GRPOConfig):
        if field.name in TRAINING and field.default is not None:
            assert TRAINING[field.name].allows(field.default), field.name


@pytest.mark.parametrize("value", [math.nan, -math.inf, "much", [1], True], ids=str)
@pytest.mark.parametrize("name", sorted(TRAINING))
def test_what_is_no_number_for_a_field_is_refused_by_its_name(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* is invalid: use .*number"):
        make_config(tmp_path, **{name: value})


@pytest.mark.parametrize("value", [-7, -0.5])
@pytest.mark.parametrize("name", sorted(set(TRAINING) - {"entropy_coef", "entropy_coef_min", "entropy_coef_max"}))
def test_negative_numbers_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* is invalid: use .*number"):
        make_config(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 0}, "max_steps=0 is invalid: use a whole number, at least 1, or -1 for num_train_epochs."),
        ({"max_steps": 2.5}, "max_steps=2.5"),
        ({"learning_rate": None}, "learning_rate=None"),
        ({"learning_rate": math.inf}, "learning_rate=inf"),
        ({"adam_beta2": 1.0}, "adam_beta2=1.0 is invalid: use a finite number, at least 0, below 1."),
        ({"reward_weights": [1.0, math.nan]}, "reward_weights=nan is invalid: use a finite number."),
        ({"reward_weights": [math.inf]}, "reward_weights=inf"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"seed": -1}, "seed=-1"),
        ({"vllm_server_port": 99999}, "vllm_server_port=99999"),
        ({"pad_to_multiple_of": "some"}, "pad_to_multiple_of='some'"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
        ({"loss_type": "ppo"}, "loss_type='ppo' is unknown: choose one of 'grpo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
        ({"generation_kwargs": "[1]"}, "generation_kwargs='[1]' is no JSON object"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs='{' is not JSON"),
        ({"model_init_kwargs": [1]}, "model_init_kwargs=[1] is no JSON object"),
    ],
)
def test_settings_that_only_training_would_trip_over(tmp_path, settings, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the words are the point
        make_config(tmp_path, **settings)
    assert words in str(refused.value)


def test_what_means_something_of_its_own_is_allowed(tmp_path):
    config = make_config(tmp_path, max_steps=-1, max_grad_norm=math.inf, save_total_limit=None, learning_rate=0)
    assert config.max_steps == -1
    assert make_config(tmp_path, pad_to_multiple_of="8", epsilon_high=math.inf).pad_to_multiple_of == 8
    assert make_config(tmp_path, scale_rewards=True).scale_rewards == "group"
