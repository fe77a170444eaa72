"""How the problems of `geometry` are solved: stationary points on the simplex, their multipliers, the best of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar, root
from scipy.special import lambertw


Measure = Literal["prob_diff", "prob_ratio", "log_prob"]
Vector = NDArray[np.float64]

# Squares and their reciprocals stay far from the limits of float64.
SMALLEST_PROBABILITY = 1e-100
# As far as the penalised problem is solved; closer to zero it is the limit β → 0, to all digits.
SMALLEST_BETA = 1e-200
_LOWEST = -1e300  # of (A − max A)/β, whose differences then are finite
# Of Lambert's W. The float64 nearest to −1/e lies just below it, where SciPy's W is NaN.
_BRANCH_POINT = math.nextafter(-1 / math.e, 0)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root between ``low`` and ``high``, as narrow as float64 allows; inf at an end does no harm."""
    return brentq(function, low, high, xtol=1e-300, rtol=4 * float(np.finfo(float).eps), maxiter=2000)


@dataclass
class Problem:
    """Actions with q > 0 summing to at most 1 and their ``gaps`` max A − A ≥ 0, which keep ties and limits exact."""

    q: Vector
    gaps: Vector
    measure: Measure
    one_sided: bool

    def distance(self, policy: Vector) -> Vector:
        """D, one-sided max(D, 0), shape (…, actions)."""
        with np.errstate(divide="ignore"):
            if self.measure == "prob_diff":
                distance = policy - self.q
            elif self.measure == "prob_ratio":
                distance = policy / self.q - 1
            else:
                distance = np.log(policy) - np.log(self.q)
        return np.maximum(distance, 0) if self.one_sided else distance

    def cost(self, policy: Vector) -> float:
        return float(np.sum(self.distance(policy) ** 2))

    def value(self, policy: Vector, beta: float) -> float:
        return float(-self.gaps @ policy) - beta / 2 * self.cost(policy)

    def reply(self, x: Vector) -> Vector:
        """π at x = (A − ν)/β, shape (…, actions); for log_prob the concave branch, at most e q."""
        if self.measure == "prob_diff":
            policy = np.maximum(self.q + x, 0)
        elif self.measure == "prob_ratio":
            policy = np.maximum(self.q + self.q * (self.q * x), 0)
        else:
            policy = self.q * np.exp(-lambertw(np.maximum(-self.q * x, _BRANCH_POINT)).real)
        return np.where(x > 0, policy, 0) if self.one_sided else policy

    def inverse(self, mass: float) -> Vector:
        """For log_prob: the x at which an action holds ``mass`` alone, or the largest of the concave branch."""
        u = np.minimum(np.log(mass / self.q), 1)
        return u * np.exp(-u) / self.q

    def without(self, j: int) -> "Problem":
        gaps = np.delete(self.gaps, j)
        return Problem(np.delete(self.q, j), gaps - gaps.min(), self.measure, self.one_sided)

    def concave(self, beta: float, mass: float = 1.0) -> Vector | None:
        """The maximum over the concave region with Σ π = mass, where log_prob's D ≤ 1; None if that holds less."""
        if self.measure == "log_prob" and math.e * self.q.sum() < mass:
            return None
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            t = np.where(self.gaps > 0, np.maximum(-self.gaps / beta, _LOWEST), 0.0)
        if self.one_sided:
            shared, above = self._shared(t, mass)
            if shared is not None:
                return shared
            if self.measure != "log_prob":
                policy = self._linear(t, above, mass)
                return policy * (mass / policy.sum())
        elif self.measure != "log_prob":
            return self._projected(t, mass)

        # x = t − τ, so τ is ν in units of β, from the best advantage.
        def surplus(tau: float) -> float:
            return float(self.reply(t - tau).sum()) - mass

        alone = self.inverse(mass)
        low, high = float(np.max(t - (np.maximum(alone, 0) if self.one_sided else alone))), float(t.max())
        step = 1.0 + abs(low)
        while surplus(low) < 0 and step < 1e300:
            low, high, step = low - step, low, 2 * step
        step = 1.0
        while not self.one_sided and surplus(high) > 0:
            high, step = high + step, 2 * step
        if self.one_sided:
            low, high = float(np.max(t[~above], initial=low)), float(np.min(t[above], initial=high))
        policy = self.reply(t - _root(surplus, low, high))
        # A Newton step on the policy: τ itself may be too large to hold the digits that the last masses need.
        room = 1 - np.log(np.maximum(policy, 1e-300) / self.q)
        slope = np.where((policy > 0) & (room > 1e-6), policy**2 / np.maximum(room, 1e-6), 0)  # none at D = 1
        if slope.any():
            policy = np.maximum(policy + slope * ((mass - policy.sum()) / slope.sum()), 0)
        return policy * (mass / policy.sum())

    def _shared(self, t: Vector, mass: float) -> tuple[Vector | None, NDArray[np.bool_]]:
        """One-sided: the maximum if actions of one advantage share what is left at x = 0, and those above it."""
        for level in np.unique(t)[::-1]:
            marginal = t == level
            policy = self.reply(t - level)
            rest = mass - policy.sum()
            if rest <= 0:
                return None, t > level
            if rest <= self.q[marginal].sum() * (1 + 1e-15):
                policy[marginal] = rest * self.q[marginal] / self.q[marginal].sum()
                return policy, t > level
        return None, np.ones_like(t, dtype=bool)

    def _linear(self, t: Vector, kept: NDArray[np.bool_], mass: float) -> Vector:
        """q + s (t − τ) of the actions that are kept, with the τ of Σ π = mass; s = dπ/dx of a quadratic cost."""
        s = np.where(kept, 1.0 if self.measure == "prob_diff" else self.q**2, 0)
        # From the action that moves most, because t itself may be too large to hold the digits that are needed.
        apart = np.where(kept, t - t[s.argmax()], 0)
        rise = (mass - self.q[kept].sum() - s @ apart) / s.sum()
        return np.where(kept, self.q + s * (apart + rise), 0)

    def _projected(self, t: Vector, mass: float) -> Vector:
        """Two-sided, for a quadratic cost: what falls below 0 is dropped until nothing does, which is exact.

        C. Michelot, Journal of Optimization Theory and Applications 50 (1986).
        """
        kept = np.ones_like(t, dtype=bool)
        while (policy := self._linear(t, kept, mass)).min() < 0:
            kept &= policy > 0
        return policy * (mass / policy.sum())

    def raisable(self) -> list[int]:
        """Actions that log_prob may raise beyond e q: none has both a higher advantage and a higher probability."""
        front, highest = [], 0.0
        for j in np.lexsort((-self.q, self.gaps)):
            if self.q[j] > highest:
                front.append(int(j))
                highest = self.q[j]
        return [j for j in front if math.e * self.q[j] < 1 and self.measure == "log_prob"]

    def raisable_pairs(self) -> list[tuple[int, int]]:
        """Pairs that log_prob may raise beyond e q under a budget: whatever beats one of them is the other."""
        pairs = []
        for i in self.raisable():
            for j in np.flatnonzero((math.e * self.q < 1) & (self.gaps != self.gaps[i])):
                beaten_by = np.flatnonzero((self.gaps <= self.gaps[j]) & (self.q >= self.q[j]))
                if set(beaten_by) <= {i, j}:
                    pairs.append((min(i, int(j)), max(i, int(j))))
        return sorted(set(pairs))

    def maximum(self, beta: float) -> Vector:
        """The penalised maximum over all distributions."""
        worse = self.gaps[self.gaps > 0]
        if worse.size and beta < SMALLEST_BETA * worse.min():
            best = self.gaps == 0
            policy = np.zeros_like(self.q)
            policy[best] = Problem(self.q[best], self.gaps[best], self.measure, self.one_sided).maximum(1.0)
            return policy
        beta = beta or 1.0  # equal advantages: it does not matter
        concave = self.concave(beta)
        candidates = [] if concave is None else [concave]
        for j in self.raisable():
            candidates += self.raised(j, beta)
        return max(candidates, key=lambda policy: self.value(policy, beta))

    def raised(self, j: int, beta: float) -> list[Vector]:
        """log_prob's local maxima with π(j) ≥ e q(j), each found from its p = π(j)."""
        t = -self.gaps / beta

        def others(p: Vector) -> Vector:
            x = t - t[j] + (np.log(p / self.q[j]) / p)[:, None]
            policy = np.where(self.q * x > (1 + 1e-9) / math.e, np.inf, self.reply(x))
            policy[:, j] = 0
            return policy

        def surplus(p: Vector) -> Vector:
            return p - 1 + others(p).sum(-1)

        grid = np.geomspace(math.e * self.q[j], 1, 257)
        grid[-1] = 1
        at_grid = surplus(grid)
        found = []
        # ν rises with p. Where the total mass rises through 1, the second derivative along the simplex is negative.
        for index in np.flatnonzero((at_grid[:-1] < 0) & (at_grid[1:] >= 0)):
            p = np.array([_root(lambda p: surplus(np.array([p]))[0], grid[index], grid[index + 1])])
            policy = others(p)[0]
            policy[j] = p[0]
            found.append(policy / policy.sum())
        return found

    def within(self, budget: float, mass: float = 1.0) -> tuple[Vector, float] | None:
        """The maximum over the concave region with Σ π = mass and Σ D² ≤ budget, and β; None if there is none."""
        scale = float(self.gaps.max())
        loosest = Problem(self.q, 0 * self.gaps, self.measure, self.one_sided).concave(1.0, mass)
        if loosest is None or self.cost(loosest) > budget:
            return None
        if scale == 0:
            return loosest, 0.0
        best = self.q * (self.gaps == 0)
        if self.one_sided and mass <= best.sum():
            return best * (mass / best.sum()), 0.0  # below q, where nothing is spent

        def policy_at(log_beta: float) -> Vector:
            policy = self.concave(scale * math.exp(log_beta), mass)
            assert policy is not None  # as `loosest`
            return policy

        def excess(log_beta: float) -> float:
            cost = self.cost(policy_at(log_beta))
            return max(min(math.log(cost / budget), 700.0), -700.0) if cost > 0 else -700.0

        # Σ D² falls as β grows: step towards the budget from where a bracket is likely, in ever wider steps.
        low, high, step = -1.0, 1.0, 1.0
        while excess(high) > 0:
            low, high, step = high, high + step, 2 * step
            if high > 300:
                return None
        step, last = 1.0, math.inf
        while (now := excess(low)) <= 0:
            # The edge of log_prob's concave region, where smaller β change nothing: what is better lies outside.
            if self.measure == "log_prob" and (abs(now - last) < 1e-9 or low < -40 - 2 * math.sqrt(budget)):
                return policy_at(low), 0.0
            low, high, step, last = low - step, low, 2 * step, now
        log_beta = _root(excess, low, high)
        return policy_at(log_beta), scale * math.exp(log_beta)

    def within_raising(self, j: int, budget: float) -> tuple[Vector, float] | None:
        """log_prob's maximum with π(j) ≥ e q(j), the others in their concave region, and β."""
        radius = math.sqrt(budget)
        # D(j) = radius · cos θ, so that the others' share of the budget, radius² sin² θ, keeps its digits near 0.
        if radius < 1:
            return None
        first = math.acos(min(1, -math.log(self.q[j]) / radius)) + 1e-7
        others = self.without(j)

        def solve(theta: float) -> Vector | None:
            p = self.q[j] * math.exp(radius * math.cos(theta))
            inner = others.within((radius * math.sin(theta)) ** 2, 1 - p) if p < 1 else None
            return None if inner is None else np.insert(inner[0], j, p)

        def loss(theta: float) -> float:
            policy = solve(theta)
            return math.inf if policy is None else float(self.gaps @ policy)

        grid = np.linspace(first, math.acos(1 / radius), 25)
        losses = [loss(theta) for theta in grid]
        best = int(np.argmin(losses))
        if math.isinf(losses[best]):
            return None
        around = (grid[max(best - 1, 0)], grid[min(best + 1, 24)])
        with np.errstate(invalid="ignore"):  # a loss of inf
            found = minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-8 * around[1]})
        policy = solve(min(found.x, grid[best], key=loss))
        assert policy is not None
        # Stationarity, π (A − ν) = β D, is linear in (ν, β).
        kept = policy > 0
        rows = np.stack([policy, self.distance(policy)], axis=-1)[kept]
        (_, beta), *_ = np.linalg.lstsq(rows, (-policy * self.gaps)[kept])
        return policy, float(beta)

    def within_raising_two(self, i: int, j: int, budget: float) -> list[tuple[Vector, float]]:
        """log_prob's stationary points with D = 1 or more at i and at j and Σ D² = budget, and β.

        D(i) and D(j) give β and ν, and these all the rest, so that two equations in two unknowns remain.
        """
        pair = [i, j]
        ceiling = np.minimum(math.sqrt(max(budget - 1, 0)), -np.log(self.q[pair]))
        if ceiling.min() < 1:
            return []

        def policy_and_beta(raised: Vector) -> tuple[Vector, Vector]:
            p = self.q[pair] * np.exp(raised)
            x = raised / p
            with np.errstate(divide="ignore"):
                beta = (self.gaps[j] - self.gaps[i]) / (x[..., 0] - x[..., 1])
            rest = x[..., :1] - (self.gaps - self.gaps[i]) / beta[..., None]
            policy = np.where(self.q * rest > 1 / math.e, np.inf, self.reply(rest))
            policy[..., pair] = p
            return policy, beta

        def residual(raised: Vector) -> Vector:
            policy, _ = policy_and_beta(raised)
            return np.stack([policy.sum(-1) - 1, (self.distance(policy) ** 2).sum(-1) / budget - 1], axis=-1)

        axes = [np.linspace(1, top, 81) for top in ceiling]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
        sign = residual(grid) > 0
        corners = np.stack([sign[:-1, :-1], sign[1:, :-1], sign[:-1, 1:], sign[1:, 1:]])
        cells = np.argwhere((corners.any(0) & ~corners.all(0)).all(-1))
        found = []
        for row, column in cells:
            point = root(residual, (grid[row, column] + grid[row + 1, column + 1]) / 2, tol=1e-13).x
            if not ((point >= 1) & (point <= ceiling) & (np.abs(residual(point)) < 1e-9)).all():
                continue
            policy, beta = policy_and_beta(point)
            if 0 < beta < math.inf:
                found.append((policy / policy.sum(), float(beta)))
        return found
