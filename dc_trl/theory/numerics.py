"""Scalar mathematics that NumPy lacks: Lambert's W, a root and a minimum."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray


def lambert_w(x: ArrayLike) -> NDArray[np.float64]:
    """Principal branch of Lambert's W, the inverse of w ↦ w e^w on w ≥ −1.

    Args:
        x: at least −1/e, any shape; below it by rounding counts as −1/e.

    Returns:
        w ≥ −1 with w e^w = x, same shape, to about 1e-15 relative, and 1e-8 at the branch point x = −1/e. inf at inf.

    Raises:
        ValueError: an x is NaN or below −1/e.
    """
    x = np.asarray(x, dtype=np.float64)
    if not np.all(math.e * x >= -1 - 1e-9):
        raise ValueError(f"x={x!r} has entries below -1/e, where W is not real: pass values of at least -1/e.")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        above = np.maximum(1 + math.e * x, 0.0)
        root = np.sqrt(above)
        # Start and Newton step in log form of Iacono and Boyd (2017): no overflow, two branches of x in one formula.
        small = math.e * x / (1 + root + math.e * x) * np.log1p(root)
        large = np.log(x) - np.log(np.log(x))
        w = np.where(x > math.e, large, small)
        for _ in range(5):
            step = w / (1 + w) * (1 + np.log(x / w))
            w = np.where(np.isfinite(step), step, w)
    w = np.where(x == 0, 0.0, np.where(np.isposinf(x), np.inf, w))
    return np.where(above < 1e-15, -1.0, np.maximum(w, -1.0))


def root(function: Callable[[float], float], low: float, high: float, accuracy: float = 0.0) -> float:
    """Root of a function that is positive at ``low`` and at most 0 at ``high``, by Chandrupatla's method.

    Ends where the function is within ``accuracy`` of 0, or the bracket is as narrow as float64 allows.
    """
    a, b = high, low
    fa, fb = function(a), function(b)
    c, fc, share = a, fa, 0.5
    for _ in range(200):
        x = a + share * (b - a)
        fx = function(x)
        if (fx > 0) == (fa > 0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        best = a if abs(fa) < abs(fb) else b
        tolerance = 4e-16 * abs(best) + 1e-300
        if min(abs(fa), abs(fb)) <= accuracy or abs(b - a) <= 2 * tolerance:
            break
        # Inverse quadratic interpolation where it is safe, else bisection, which a leap or an inf cannot mislead.
        share = 0.5
        if all(map(math.isfinite, (fa, fb, fc))) and len({fa, fb, fc}) == 3:
            ratio, heights = (a - b) / (c - b), (fa - fb) / (fc - fb)
            if heights**2 < ratio and (1 - heights) ** 2 < 1 - ratio:
                share = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        edge = tolerance / abs(b - a)
        share = min(max(share, edge), 1 - edge)
    return best


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    points = [high - ratio * (high - low), low + ratio * (high - low)]
    values = [function(point) for point in points]
    while high - low > 1e-8 * high:
        if values[0] <= values[1]:
            high = points[1]
            points = [high - ratio * (high - low), points[0]]
            values = [function(points[0]), values[0]]
        else:
            low = points[0]
            points = [points[1], low + ratio * (high - low)]
            values = [values[1], function(points[1])]
    return points[0] if values[0] <= values[1] else points[1]
