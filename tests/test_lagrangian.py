"""The multiplier against the recursion written out, and its properties."""

import math
from functools import cache

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dc_trl import LagrangeMultiplier
from dc_trl.constraint import lagrangian
from dc_trl.constraint.lagrangian import AUTO_BATCHES, proposed_tolerance, student_quantile
from dc_trl.constraint.settings import ConstraintSettings

from .helpers import (
    refuses,
    restore,
)


def test_recursion_by_hand():
    multiplier = LagrangeMultiplier(init=0.1, lr=2.0, tolerance=0.01, maximum=0.2)
    assert multiplier.value == 0.1
    assert multiplier.update(0.02) == pytest.approx(0.12)  # 0.1 + 2 (0.02 − 0.01)
    assert multiplier.update(0.01) == pytest.approx(0.12)  # at the tolerance: unmoved
    assert multiplier.update(0.0) == pytest.approx(0.10)
    assert multiplier.update(1.0) == 0.2  # projected
    for _ in range(20):
        multiplier.update(0.0)
    assert multiplier.value == 0.0


def test_proposed_tolerance_by_hand():
    # mean 2, squared deviations 1 + 0 + 1, over n − 1 = 2: standard deviation 1; t with 2 degrees of freedom: 4.302653
    assert proposed_tolerance([1.0, 2.0, 3.0]) == pytest.approx(2 + 4.302653 * math.sqrt(4 / 3))
    # The same of ten values 1 and 3, five each: deviation √(10/9); t with 9 degrees of freedom: 2.262157
    assert proposed_tolerance([1.0, 3.0] * 5) == pytest.approx(2 + 2.262157 * math.sqrt(11 / 10) * math.sqrt(10 / 9))
    with refuses(ValueError, "at least two"):
        proposed_tolerance([1.0])


def test_student_quantile_is_scipys():
    freedoms = [*range(1, 40), 99, 9_999]
    found = [student_quantile(freedom) for freedom in freedoms]
    np.testing.assert_allclose(found, scipy.stats.t.ppf(0.975, freedoms), rtol=1e-10)


def test_one_healthy_batch_in_forty_is_above_the_tolerance(monkeypatch):
    """Normally distributed δ̄, 4,000 runs: 2.5 % ± 0.25 %. Mean plus 1.96 deviations of ten batches: 4.7 %."""
    monkeypatch.setattr(lagrangian, "student_quantile", cache(student_quantile))
    rng = np.random.default_rng(0)
    runs = rng.normal(0.002, 0.0003, (4_000, AUTO_BATCHES + 1))
    above = np.mean([run[-1] > proposed_tolerance(run[:-1].tolist()) for run in runs])
    assert 0.019 < above < 0.031


def test_automatic_tolerance():
    multiplier = LagrangeMultiplier(init=0.1, lr=1.0, tolerance="auto")
    observed = [0.010 + 0.001 * (n % 3) for n in range(AUTO_BATCHES)]
    for value in observed[:-1]:
        assert multiplier.update(value) == 0.1
        assert multiplier.tolerance is None
    killed = restore(LagrangeMultiplier(init=0.1, lr=1.0, tolerance="auto"), multiplier)
    expected = np.mean(observed) + 2.262157 * math.sqrt(1.1) * np.std(observed, ddof=1)
    for one in (multiplier, killed):
        assert one.update(observed[-1]) == 0.1
        assert one.tolerance == pytest.approx(expected)
        assert one.update(0.02) == pytest.approx(0.1 + 0.02 - expected)
    resumed = restore(LagrangeMultiplier(init=0.1, lr=1.0, tolerance="auto"), multiplier)
    assert (resumed.tolerance, resumed.value) == (multiplier.tolerance, multiplier.value)


def test_a_given_tolerance_stays_whatever_a_state_says():
    automatic = LagrangeMultiplier(tolerance="auto")
    for _ in range(AUTO_BATCHES):
        automatic.update(0.01)
    given = restore(LagrangeMultiplier(tolerance=0.5), automatic)
    assert given.tolerance == 0.5
    assert restore(automatic, given).tolerance is None  # a run that had a given one, continued with "auto"


def test_a_state_is_fitted_to_the_present_bounds_and_window():
    before = LagrangeMultiplier(init=0.9, tolerance=0.0, window=3)
    for value in (0.01, 0.02, 0.03):
        before.update(value)
    after = restore(LagrangeMultiplier(tolerance=0.1, maximum=0.5, window=2), before)
    assert after.value == 0.5
    assert after.update(0.05) == pytest.approx(0.5 + (0.03 + 0.05) / 2 - 0.1)
    assert restore(LagrangeMultiplier(init=2.0, minimum=1.5, maximum=3.0), before).value == 1.5


@pytest.mark.parametrize("value", [math.nan, -5.0, 1e30, math.inf, None])
@pytest.mark.parametrize("bound", [True, False])
def test_a_multiplier_that_a_run_cannot_have_had_is_refused(value, bound):
    state = LagrangeMultiplier().state_dict() | {"value": value}
    if not bound:
        del state["maximum"]  # of an earlier release
    with refuses(ValueError, "lagrange_multiplier", repr(value)):
        LagrangeMultiplier().load_state_dict(state)
    with refuses(ValueError, "discrepancy", "nan"):
        LagrangeMultiplier().load_state_dict(state | {"value": 0.1, "recent": [math.nan]})


@pytest.mark.parametrize(
    "bounds", [{"minimum": 0.5, "maximum": 0.4}, {"init": 2.0}, {"init": math.nan}, {"minimum": -1}]
)
def test_bounds_that_no_multiplier_has_are_refused(bounds):
    with refuses(ValueError, *(f"{name}={value}" for name, value in bounds.items()), "minimum ≤ init ≤ maximum"):
        LagrangeMultiplier(**bounds)


def test_a_multiplier_is_that_of_its_settings():
    """λ of each step by hand: up to the maximum, a mean over three batches, and down to the minimum."""
    settings = ConstraintSettings(
        constraint="lagrangian",
        discrepancy_tolerance=0.1,
        lambda_init=0.5,
        lambda_lr=2.0,
        lambda_min=0.3,
        lambda_max=0.9,
        dual_window=3,
    )
    multiplier = LagrangeMultiplier.of(settings)
    assert multiplier.value == 0.5
    found = [multiplier.update(value) for value in (0.2, 0.2, 0.1, 0.0, 0.0)]
    assert found == pytest.approx([0.7, 0.9, 0.9, 0.9, 0.9 + 2 * (0.1 / 3 - 0.1)])
    assert [multiplier.update(0.0) for _ in range(3)][-1] == 0.3


def test_what_is_no_discrepancy_is_refused():
    with refuses(ValueError, "mean_discrepancy="):
        LagrangeMultiplier().update(math.nan)


discrepancies = st.floats(0, 10, allow_nan=False)


@given(
    st.lists(discrepancies, max_size=8),
    st.lists(discrepancies, min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_state_continues_where_it_was_saved(before, after, window):
    options = {"lr": 0.05, "window": window}
    whole = LagrangeMultiplier(**options)
    for value in before:
        whole.update(value)
    resumed = restore(LagrangeMultiplier(**options), whole)
    assert [whole.update(value) for value in after] == [resumed.update(value) for value in after]
