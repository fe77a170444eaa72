"""The closed forms against SciPy's optimisers, which know nothing of them, and the six actions of the example."""

import math
from typing import get_args

import numpy as np
import pytest
from geometry import budgeted_policy, optimal_policy, squared_discrepancy
from scipy.optimize import minimize
from simplex import Measure
from six_actions import INFER_PROBS, outcomes

from dc_trl.constraint import discrepancy


MEASURES = get_args(Measure)
sides = pytest.mark.parametrize("one_sided", [False, True], ids=["two-sided", "one-sided"])
measures = pytest.mark.parametrize("measure", MEASURES)


def cost(policy, q, measure, one_sided):
    """Σ D², written once more."""
    policy = np.maximum(policy, 1e-300)
    distance = {"prob_diff": policy - q, "prob_ratio": policy / q - 1, "log_prob": np.log(policy / q)}[measure]
    return float(np.sum((np.maximum(distance, 0) if one_sided else distance) ** 2))


def numerical_maximum(value, q, budget=None, spent=None):
    """The best that SLSQP finds from the inner and the outer region of the simplex."""
    n, floor = len(q), 1e-12
    starts = [q, np.full(n, 1 / n)] + [0.05 * q + 0.95 * corner for corner in np.eye(n)]
    starts += list(np.random.default_rng(0).dirichlet(np.ones(n), 4))
    constraints = [{"type": "eq", "fun": lambda policy: policy.sum() - 1}]
    if budget is not None:
        constraints.append({"type": "ineq", "fun": lambda policy: budget - spent(policy)})
    best = -math.inf
    for start in starts:
        found = minimize(
            lambda policy: -value(policy),
            np.maximum(start, 1e-9),
            bounds=[(floor, 1)] * n,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 400},
        ).x
        found = np.maximum(found, floor) / np.maximum(found, floor).sum()
        if budget is None or spent(found) <= budget * (1 + 1e-8):
            best = max(best, value(found))
    return best


def draw_problem(seed, largest=5):
    rng = np.random.default_rng(seed)
    n = rng.integers(2, largest + 1)
    q = np.maximum(rng.dirichlet(np.full(n, rng.choice([0.3, 1, 5]))), 1e-5)
    return q / q.sum(), rng.normal(size=n), rng


def test_measures_are_the_librarys():
    assert get_args(discrepancy.Measure)[:3] == MEASURES  # the fourth is half the square of the third


@measures
@sides
@pytest.mark.parametrize("seed", range(2))
def test_penalised_maximum_is_the_global_one(seed, measure, one_sided):
    q, advantages, rng = draw_problem(seed)
    beta = 10 ** rng.uniform(-1.5, 1.5)

    def value(policy):
        return policy @ advantages - beta / 2 * cost(policy, q, measure, one_sided)

    policy = optimal_policy(q, advantages, beta, measure, one_sided)
    assert policy.sum() == pytest.approx(1, abs=1e-12)
    assert policy.min() >= 0
    # SLSQP keeps a distance of 1e-12 from the boundary, and is not always exact: it may only fall short.
    assert value(policy) >= numerical_maximum(value, q) - 1e-8
    assert squared_discrepancy(policy, q, measure, one_sided) == pytest.approx(cost(policy, q, measure, one_sided))


@measures
@sides
@pytest.mark.parametrize("seed", range(2))
def test_budgeted_maximum_is_the_global_one(seed, measure, one_sided):
    q, advantages, rng = draw_problem(seed, largest=4)
    largest = min(cost(np.eye(len(q))[advantages.argmax()], q, measure, one_sided), 6)
    budget = rng.uniform(0.05, 0.8) * largest
    policy, beta = budgeted_policy(q, advantages, budget, measure, one_sided)
    assert beta > 0
    assert cost(policy, q, measure, one_sided) == pytest.approx(budget, abs=1e-6)
    best = numerical_maximum(lambda policy: policy @ advantages, q, budget, lambda p: cost(p, q, measure, one_sided))
    assert policy @ advantages == pytest.approx(best, abs=1e-6)


@sides
@pytest.mark.parametrize("budget", [0.1, 0.8])
def test_probability_difference_is_sparsest_and_seeks_the_tail(one_sided, budget):
    found = outcomes(one_sided, budget)
    difference, log, ratio = found["prob_diff"], found["log_prob"], found["prob_ratio"]
    assert difference.support < log.support <= ratio.support
    assert difference.tail > 5 * max(log.tail, ratio.tail)
    # One-sided the logarithm lies between; two-sided an action dropped costs it infinitely much, the ratio 1.
    assert difference.entropy < min(log.entropy, ratio.entropy)
    if one_sided:
        assert log.entropy < ratio.entropy
    else:
        assert ratio.entropy < log.entropy
        assert ratio.support == log.support == 6
    for name, outcome in found.items():
        assert outcome.beta > 0
        assert cost(outcome.policy, INFER_PROBS, name, one_sided) == pytest.approx(budget, rel=1e-6)
