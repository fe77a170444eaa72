"""What a number may be: ranges against their plain meaning, and the numbers of a configuration."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dc_trl.settings.fields import Range

from .helpers import make_config


bounds = st.integers(-3, 3)
lowest = st.just(-math.inf)
numbers = st.integers(-5, 5) | st.floats(allow_nan=True, allow_infinity=True) | st.booleans()


@given(lowest | bounds, lowest | bounds, st.just(math.inf) | bounds, st.booleans(), st.booleans(), numbers)
def test_a_range_holds_what_it_says(least, above, most, whole, infinite, value):
    expected = not isinstance(value, bool)
    expected &= isinstance(value, int) if whole else True
    expected &= not (isinstance(value, float) and math.isnan(value)) and value != -math.inf
    expected &= infinite or value != math.inf
    expected &= value >= least and value > above and value <= most
    assert Range(least, above, most, whole, infinite).allows(value) == expected


def test_numbers_of_numpy_are_numbers():
    for value in (np.float64(0.5), np.float32(0.5)):
        assert Range(least=0).allows(value)
        assert not Range(whole=True).allows(value)
    assert Range(least=1, whole=True).allows(np.int64(3))
    assert not Range().allows("0.5")
    assert not Range().allows(None)


def test_what_means_something_of_its_own_is_allowed(tmp_path):
    config = make_config(tmp_path, max_steps=-1, max_grad_norm=math.inf, save_total_limit=None, learning_rate=0)
    assert config.max_steps == -1
    assert make_config(tmp_path, pad_to_multiple_of="8", epsilon_high=math.inf).pad_to_multiple_of == 8
    assert make_config(tmp_path, scale_rewards=True).scale_rewards == "group"
