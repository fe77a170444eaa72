"""The length-decay schedule against Algorithm 1 written out, and the surge on synthetic curves."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dc_trl import LengthDecaySchedule, SurgeDetector

from .helpers import (
    refuses,
    restore,
)


# --- the schedule ---------------------------------------------------------------------------------------------------


def make_optimizer(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)])


def advance(schedule, steps):
    """The first group's rate during each of the next steps."""
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


def algorithm_1(steps, periods, floor):
    """The rates of the paper's loop; `periods[t]` is the period that was in force when step t + 1 began."""
    rate, rates = 1.0, []
    for step in range(1, steps + 1):
        if periods[step - 1] is not None and step % periods[step - 1] == 0:
            rate = max(rate / 2, floor)
        rates.append(rate)  # the update of this step
    return rates


def test_rates_by_hand():
    # Steps 1 and 2 are at the full rate, step 3 is the first at half of it, then 6, 9, and 12 at the floor.
    schedule = LengthDecaySchedule(make_optimizer(8.0, 0.8), decay_period=3)
    assert advance(schedule, 15) == [8.0] * 2 + [4.0] * 3 + [2.0] * 3 + [1.0] * 3 + [0.8] * 4
    assert schedule.get_last_lr() == pytest.approx([0.8, 0.08])
    assert schedule.factor == 0.1
    advance(schedule, 5000)
    assert schedule.factor == 0.1


@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 60), st.floats(0.01, 1))
def test_whenever_the_period_is_set_the_rates_are_algorithm_1s(period, before, after, floor):
    schedule = LengthDecaySchedule(make_optimizer(), floor=floor)
    rates = advance(schedule, before)
    schedule.decay_period = period
    assert schedule.factor == 1.0  # setting the period moves nothing
    rates += advance(schedule, after)
    # The rate of a step is made when the one before ends.
    assert rates == pytest.approx(algorithm_1(before + after, [None] * (before + 1) + [period] * after, floor))


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 9), st.booleans())
def test_a_restored_schedule_goes_on_as_the_saved_one(before, after, period, with_optimizer):
    whole = LengthDecaySchedule(make_optimizer(2.0), floor=0.2)
    advance(whole, before // 2)
    if period is not None:
        whole.decay_period = period
    advance(whole, before - before // 2)
    resumed = LengthDecaySchedule(make_optimizer(7.0))
    if with_optimizer:
        resumed.optimizer.load_state_dict(whole.optimizer.state_dict())
    assert restore(resumed, whole).state_dict() == whole.state_dict()
    assert advance(resumed, after) == advance(whole, after)


def test_a_period_that_is_given_anew_holds_from_the_resumption_on():
    for old, rates in ((100, [8.0, 4.0, 4.0, 4.0]), (6, [4.0, 2.0, 2.0, 2.0]), (2, [0.8, 0.8, 0.8, 0.8])):
        whole = LengthDecaySchedule(make_optimizer(8.0), decay_period=old)
        advance(whole, 10)  # no halving, one, and as many as the floor of 0.1 allows
        resumed = restore(LengthDecaySchedule(make_optimizer(8.0), decay_period=4), whole)
        assert advance(resumed, 4) == rates  # of the steps 11 to 14


@pytest.mark.parametrize("period", [0, 1.5])
def test_invalid_numbers_are_refused(period):
    with refuses(ValueError, "floor=1.1 is invalid"):
        LengthDecaySchedule(make_optimizer(), floor=1.1)
    with refuses(ValueError, "decay_period=", "is invalid"):
        LengthDecaySchedule(make_optimizer(), decay_period=period)
    schedule = LengthDecaySchedule(make_optimizer(), decay_period=7)
    with refuses(ValueError, "decay_period=", "is invalid"):
        schedule.decay_period = period


# --- the surge ------------------------------------------------------------------------------------------------------


def jump(at, high=3500, steps=300):
    return [1000 if step < at else high for step in range(1, steps + 1)]


def sigmoid(centre, width):
    """`width`: steps from 10 % to 90 % of the rise."""
    slope = 2 * math.log(9) / width
    return [1000 + 2500 / (1 + math.exp(-slope * (step - centre))) for step in range(1, 301)]


def noisy(curve, deviation, seed):
    rng = random.Random(seed)
    return [length * max(0.05, rng.gauss(1, deviation)) for length in curve]


def surge(curve):
    """(step of the surge, step at which it was found), or None."""
    detector = SurgeDetector()
    for step, length in enumerate(curve, start=1):
        found = detector.update(length)
        if found is not None:
            assert found == detector.surge_step <= step == detector.step
            return found, step
    return None


@pytest.mark.parametrize(("curve", "tolerance"), [(jump(100), 2), (sigmoid(100, 40), 10)])
def test_a_surge_is_found_in_noise(curve, tolerance):
    for seed in range(3):
        step, found = surge(noisy(curve, 0.15, seed))
        assert abs(step - 100) <= tolerance
        assert found == step + 4


@pytest.mark.parametrize("deviation", [0, 0.15])
@pytest.mark.parametrize(
    "curve",
    [
        [1000 * 3.5 ** (step / 300) for step in range(300)],
        jump(100, high=300),
        [1000 + 300 * math.sin(step / 10) for step in range(500)],
    ],
)
def test_what_is_no_surge_is_not_found(curve, deviation):
    assert all(surge(noisy(curve, deviation, seed)) is None for seed in range(3))


lengths = st.lists(st.sampled_from([0.0, math.nan]) | st.floats(1, 1e4), min_size=30, max_size=150)


@given(lengths)
def test_the_rule_by_brute_force(curve):
    expected = None
    measured = [(step, x) for step, x in enumerate(curve, start=1) if x > 0]
    for end in range(19, len(measured) + 1):
        window, before = measured[end - 9 : end], measured[max(0, end - 89) : end - 9]
        if statistics.median(x for _, x in window) >= 2 * statistics.median(x for _, x in before):
            expected = window[4][0], window[8][0]
            break
    assert surge(curve) == expected


@pytest.mark.parametrize("cut", [60, 103])
def test_the_reactive_schedule_and_its_resumption(cut):
    curve = jump(101, steps=400)
    whole = LengthDecaySchedule(make_optimizer())
    rates = []
    for step, length in enumerate(curve):
        if step == cut:
            whole = restore(LengthDecaySchedule(make_optimizer()), whole)
        rates += advance(whole, 1)
        whole.observe(length)
    assert (whole.detector.surge_step, whole.decay_period) == (101, 182)  # 1.8 × 101 = 181.8
    assert rates == [1.0] * 181 + [0.5] * 182 + [0.25] * 37
