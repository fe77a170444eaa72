"""What counts as correct."""

import pytest

from dc_trl import math_reward
from dc_trl.grading.rewards import arithmetic_reward, get_reward

from .helpers import refuses


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (r"so \boxed{46}", "46", 1.0),
        (r"\boxed{46}, no: \boxed{40}", "46", 0.0),
        (r"\boxed{40+6}", "46", 0.0),
        (r"\boxed{046}", "46", 0.0),
        (r"\boxed{ 46 }", "46", 0.0),
        (r"\boxed{-7}", "-7", 1.0),
        ("46", "46", 0.0),
        (r"\boxed{46}, no: \boxed{4", "46", 0.0),
        (r"\boxed{46}", "40 + 6 = <<40+6=46>>46\n#### 46", 1.0),
        (r"\boxed{46}", "046", None),
    ],
)
def test_arithmetic_takes_the_plain_integer_only(completion, gold, expected):
    assert arithmetic_reward([completion], [gold]) == [expected]
    assert arithmetic_reward([[{"role": "assistant", "content": completion}]], [gold], extra=[1]) == [expected]


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{40+6}", "46", 0.0),
        (r"\boxed{3}", r"\boxed{3}", 1.0),
        (r"\boxed{3}, no: \boxed{4", "3", 0.0),
        (r"\boxed{72}", "He sold 48/2 = <<48/2=24>>24 clips in May.\nThat is 72.\n#### 72", 1.0),
        (r"\boxed{72}", "no answer follows ####", None),
        (r"\boxed{72}", 72.0, 1.0),
        (r"\boxed{72}", None, None),
    ],
)
def test_math_compares_values(completion, gold, expected):
    assert math_reward([completion], [gold]) == [expected]
    assert math_reward([[{"role": "assistant", "content": completion}]], answer=[gold], other=[1]) == [expected]


def test_math_reads_what_the_data_says_about_an_answer():
    columns = {
        "multiple_answers": [True, None, False, False],
        "unit": [None, "cm", "cm", None],
        "relative_tolerance": [None, 0.0, 0.0, 0.01],
        "absolute_tolerance": [0.0, 0.5, 0.0, 0.0],
    }
    completions = [r"\boxed{2, 1}", r"\boxed{7.5\text{ cm}}", r"\boxed{7\text{ kg}}", r"\boxed{8.72 \times 10^8}"]
    assert math_reward(completions, ["1,2", "7", "7", "8.7e8"], **columns) == [1.0, 1.0, 0.0, 1.0]
    assert math_reward(completions, ["1,2", "7", "7", "8.7e8"]) == [1.0, 0.0, 1.0, 0.0]


def test_rewards_by_name():
    assert get_reward("math") is math_reward
    assert get_reward("dc_trl.grading.rewards.arithmetic_reward") is arithmetic_reward
    for name in ("maths", "no.such.module", "dc_trl.grading.rewards.nothing"):
        with refuses(ValueError, f"rewards='{name}'", "'math', 'arithmetic'"):
            get_reward(name)
