"""What each of the three penalties makes of a policy: closed forms on the probability simplex.

One state, actions a with probabilities q(a) = π_inf(a) > 0 and advantages A(a). Two problems over
distributions π (arXiv 2606.08779, Appendix B):

    penalised   max  Σ_a π(a) A(a) − (β/2) Σ_a D(a)²          `optimal_policy`
    budgeted    max  Σ_a π(a) A(a)  with  Σ_a D(a)² ≤ budget    `budgeted_policy`, which also finds the multiplier β

with D = π − q (``prob_diff``), π/q − 1 (``prob_ratio``) or log π − log q (``log_prob``); one-sided, max(D, 0) takes
the place of D: only growth is penalised. With x = (A − ν)/β, where ν makes the masses sum to one, the stationary
points are

    prob_diff   π = max(0, q + x)
    prob_ratio  π = max(0, q + q² x)
    log_prob    π = q exp(−W(−q x)),  W Lambert's function, principal branch

Two-sided these hold for every x. One-sided they hold for x > 0; an action with x < 0 loses all its mass, at no
cost, and those with x = 0 keep what is left.

The first two problems are concave. The third is not: −log²(π/q) is concave in π only while log(π/q) ≤ 1, and beyond
that the stationary points lie on W's other branch. Of a penalised maximum at most one action can lie there (two would
gain by exchanging mass), of a budgeted one at most two (among three, some exchange keeps mass and advantage and spends
less). So every action, and under a budget every pair, that may lie there is tried, with the others in their concave
region, and the best of all is returned. The search starts from grids: it is checked numerically, not proved complete.
"""

import math
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike
from simplex import SMALLEST_PROBABILITY, Measure, Problem, Vector


def squared_discrepancy(
    policy: ArrayLike, infer_probs: ArrayLike, measure: Measure = "prob_diff", one_sided: bool = False
) -> float:
    """Return Σ_a D(a)² of a policy, which the budget bounds (arXiv 2606.08779, Appendix B).

    Args:
        policy: π, shape (actions,), a distribution.
        infer_probs: q = π_inf, shape (actions,), a distribution; positive unless ``measure`` is ``"prob_diff"``.
        measure: which D.
        one_sided: max(D, 0) in place of D.

    Returns:
        At least 0; inf for ``"log_prob"``, two-sided, where the policy has dropped an action.

    Raises:
        ValueError: no distribution, an unknown measure, or the shapes differ.
    """
    return _problem(infer_probs, policy, measure, one_sided).cost(_distribution("policy", policy))


def optimal_policy(
    infer_probs: ArrayLike, advantages: ArrayLike, beta: float, measure: Measure = "prob_diff", one_sided: bool = False
) -> Vector:
    """Return the distribution that maximises Σ π A − (β/2) Σ D² globally (arXiv 2606.08779, Appendix B).

    Args:
        infer_probs: q = π_inf, shape (actions,), a distribution; ≥ 1e-100 unless ``measure`` is ``"prob_diff"``.
        advantages: A, shape (actions,), finite.
        beta: at least 0. inf gives q. 0 is the limit β → 0: the best actions share everything, at the least Σ D².
        measure, one_sided: as in `squared_discrepancy`.

    Returns:
        π*, shape (actions,), float64. Where it is not unique: one-sided, actions of one advantage that are neither
        raised nor dropped share in proportion to q; ``"log_prob"`` raises the first of equal actions.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """
    if not beta >= 0:
        raise ValueError(f"beta={beta!r} is invalid: use a number that is at least 0.")
    problem = _problem(infer_probs, advantages, measure, one_sided)
    return problem.q if math.isinf(beta) or not problem.gaps.any() else problem.maximum(float(beta))


def budgeted_policy(
    infer_probs: ArrayLike,
    advantages: ArrayLike,
    budget: float,
    measure: Measure = "prob_diff",
    one_sided: bool = False,
) -> tuple[Vector, float]:
    """Return the distribution that maximises Σ π A within Σ D² ≤ budget, and its multiplier β.

    Source: arXiv 2606.08779, Appendix B.

    Args:
        infer_probs: q = π_inf, shape (actions,), a distribution; ≥ 1e-100 unless ``measure`` is ``"prob_diff"``.
        advantages: A, shape (actions,), finite.
        budget: of Σ D², at least 0.
        measure, one_sided: as in `squared_discrepancy`.

    Returns:
        π*, shape (actions,), float64, and β ≥ 0. β > 0: the budget is spent. β = 0: the budget is slack, and π* is
        what it would be without one. β = inf: the budget is 0 and π* is q. For ``"log_prob"`` β makes π* a stationary
        point of the penalised problem but not always its maximum: as β falls, that maximum leaps over some budgets.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """
    if not (budget >= 0 and math.isfinite(budget)):
        raise ValueError(f"budget={budget!r} is invalid: use a finite number that is at least 0.")
    problem = _problem(infer_probs, advantages, measure, one_sided)
    if not problem.gaps.any():
        return problem.q, 0.0
    unconstrained = problem.maximum(0.0)
    if problem.cost(unconstrained) <= budget:
        return unconstrained, 0.0
    if budget == 0:
        return problem.q, math.inf
    solution = problem.within(budget)
    if measure != "log_prob":
        assert solution is not None
        return solution
    if solution is not None and solution[1] > 0:
        policy, beta = solution
        # A maximum of the Lagrangian is a maximum under the budget.
        if problem.value(policy, beta) >= problem.value(problem.maximum(beta), beta) - 1e-13 * problem.gaps.max():
            return solution
    candidates = [solution] if solution is not None else []
    candidates += [raised for j in problem.raisable() if (raised := problem.within_raising(j, budget)) is not None]
    candidates += [raised for pair in problem.raisable_pairs() for raised in problem.within_raising_two(*pair, budget)]
    # Rounding at the edge of a region can make what is beyond the budget look best.
    candidates = [found for found in candidates if abs(problem.cost(found[0]) / budget - 1) < 1e-7]
    if not candidates:
        raise ValueError(f"budget={budget!r}: no maximum was found to 1e-9; try a budget slightly larger or smaller.")
    return max(candidates, key=lambda candidate: -problem.gaps @ candidate[0])


def _distribution(name: str, probabilities: ArrayLike) -> Vector:
    array = np.asarray(probabilities, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}: pass one probability for each action.")
    if not (np.all(array >= 0) and abs(array.sum() - 1) <= 1e-6):
        raise ValueError(f"{name}={array.tolist()!r} is no distribution: pass probabilities >= 0 that sum to 1.")
    return array / array.sum()


def _problem(infer_probs: ArrayLike, advantages: ArrayLike, measure: Measure, one_sided: bool) -> Problem:
    if measure not in get_args(Measure):
        choices = ", ".join(map(repr, get_args(Measure)))
        raise ValueError(f"measure={measure!r} is unknown: choose one of {choices}.")
    q = _distribution("infer_probs", infer_probs)
    a = np.asarray(advantages, dtype=np.float64)
    if a.shape != q.shape:
        raise ValueError(f"{q.size} infer_probs but shape {a.shape} beside them: pass one number for each action.")
    if not np.all(np.isfinite(a)):
        raise ValueError(f"advantages={a.tolist()!r} are not finite: pass finite advantages.")
    if measure != "prob_diff" and q.min() < SMALLEST_PROBABILITY:
        raise ValueError(
            f"infer_probs has {q.min()!r}, by which measure={measure!r} cannot divide: leave such actions out."
        )
    return Problem(q, a.max() - a, measure, one_sided)
