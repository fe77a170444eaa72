"""Estimators against enumeration: every draw, every tie, every resample."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from dc_trl.records.estimators import macro_estimate, majority_at_k, mean_estimate, paired_difference, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
@settings(deadline=None)
def test_pass_at_k_is_the_mean_over_all_draws_of_k_samples(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    draws = list(itertools.combinations(correct, k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected)


@given(st.lists(st.sampled_from(["1", "2", "3", None]), max_size=7), st.sampled_from(["1", "2", "4"]))
@settings(deadline=None)
def test_the_majority_is_drawn_fairly_among_those_with_most_votes(answers, gold):
    voters = [answer for answer in answers if answer is not None]
    modes = statistics.multimode(voters)
    expected = sum(mode == gold for mode in modes) / len(modes) if modes else 0.0
    assert majority_at_k(answers, [answer == gold for answer in answers]) == pytest.approx(expected)


def test_a_mean_and_its_standard_error_by_hand():
    # Four samples of each of three problems: it is the three means that vary, not twelve answers.
    estimate = mean_estimate([0.25, 0.5, 1.0])
    assert estimate.value == pytest.approx(7 / 12)
    variance = ((0.25 - 7 / 12) ** 2 + (0.5 - 7 / 12) ** 2 + (1 - 7 / 12) ** 2) / 2
    assert estimate.standard_error == pytest.approx(math.sqrt(variance / 3))
    assert estimate.problems == 3
    assert mean_estimate([0.25, 0.5, 1.0]) == estimate


def test_the_interval_is_that_of_all_resamples():
    values = [0.0, 0.25, 0.25, 0.5, 1.0]
    every = sorted(statistics.fmean(draw) for draw in itertools.product(values, repeat=5))
    estimate = mean_estimate(values)
    # The distribution has steps of 0.05.
    assert estimate.low == pytest.approx(every[int(0.025 * len(every))], abs=0.051)
    assert estimate.high == pytest.approx(every[int(0.975 * len(every))], abs=0.051)


def test_the_average_over_benchmarks_weighs_them_equally():
    first, second = [0.0, 1.0], [0.5] * 100 + [1.0]
    estimate = macro_estimate([first, second])
    assert estimate.value == pytest.approx((0.5 + statistics.fmean(second)) / 2)
    errors = [statistics.stdev(values) ** 2 / len(values) for values in (first, second)]
    assert estimate.standard_error == pytest.approx(math.sqrt(sum(errors)) / 2)


@pytest.mark.parametrize("benchmarks", [[[0.0] * 16], [[1.0] * 40], [[0.0] * 16, [1.0] * 40]])
def test_problems_that_are_all_right_or_all_wrong_have_wilsons_interval(benchmarks):
    wilson = [binomtest(int(sum(values)), len(values)).proportion_ci(method="wilson") for values in benchmarks]
    estimate = macro_estimate(benchmarks)
    assert estimate.low == pytest.approx(statistics.fmean(each.low for each in wilson))
    assert estimate.high == pytest.approx(statistics.fmean(each.high for each in wilson))
    assert paired_difference(benchmarks, benchmarks).high == 0.0


def test_a_p_value_is_that_of_all_resamples():
    first, second = [0.0, 0.25, 0.5, 0.5, 0.75], [0.5, 0.25, 1.0, 0.75, 0.75]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    observed = statistics.fmean(differences)
    means = [statistics.fmean(draw) for draw in itertools.product(differences, repeat=5)]
    expected = sum(abs(mean - observed) >= abs(observed) - 1e-12 for mean in means) / len(means)
    result = paired_difference([first], [second])
    assert result.value == pytest.approx(0.25)
    assert result.p_value == pytest.approx(expected, abs=0.01)
    assert result.standard_error == pytest.approx(statistics.stdev(differences) / math.sqrt(5))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([[0.25]], [[0.75]]),  # one problem
        ([[0.0, 0.25, 0.5], [0.25]], [[0.5, 0.25, 1.0], [0.75]]),  # one problem of one benchmark
        ([[0.1, 0.2, 0.3, 0.7]], [[0.2, 0.3, 0.4, 0.8]]),  # identical but for rounding
    ],
)
def test_without_a_standard_error_there_is_no_p_value(first, second):
    for pair in ((first, second), (second, first)):
        assert paired_difference(*pair).p_value is None


def test_few_problems_have_no_small_p_value():
    # The same problem n times has probability 1/4 for two, 1/27 for three: on either side.
    assert paired_difference([[0.0, 0.0]], [[0.25, 0.5]]).p_value == 1 / 2
    assert paired_difference([[0.0, 0.0, 0.0]], [[0.25, 0.5, 0.75]]).p_value == pytest.approx(2 / 27)
    assert paired_difference([[0.0, 0.0]] * 2, [[0.25, 0.5]] * 2).p_value == pytest.approx(2 / 16)
