"""What a number may be: ranges against their plain meaning, and the numbers of a configuration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dc_trl.settings.ranges import Range

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


def test_numbers_of_numpy_are_numbers():
    for value in (np.float64(0.5), np.float32(0.5)):
        assert Range(least=0).allows(value)
        assert not Range(whole=True).allows(value)
    assert Range(least=1, whole=True).allows(np.int64(3))
    assert not Range().allows("0.5")
    assert not Range().allows(None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": None}, "learning_rate=None"),
        ({"learning_rate": "much"}, "learning_rate='much' is invalid: use a finite number, at least 0."),
        ({"reward_weights": [1.0, math.nan]}, "reward_weights=nan is invalid: use a finite number."),
        ({"dual_window": 2.5}, "dual_window=2.5 is invalid: use a whole number, at least 1."),
        ({"loss_type": "ppo"}, "loss_type='ppo' is unknown: choose one of 'grpo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word'"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs='{' is not JSON"),
    ],
)
def test_a_value_that_a_field_does_not_take_is_refused_by_its_name(tmp_path, settings, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the words are the point
        make_config(tmp_path, **settings)
    assert words in str(refused.value)


def test_what_means_something_of_its_own_is_allowed(tmp_path):
    config = make_config(tmp_path, max_steps=-1, max_grad_norm=math.inf, save_total_limit=None, learning_rate=0)
    assert config.max_steps == -1
    assert make_config(tmp_path, pad_to_multiple_of="8", epsilon_high=math.inf).pad_to_multiple_of == 8
    assert make_config(tmp_path, scale_rewards=True).scale_rewards == "group"
