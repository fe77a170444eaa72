"""The Lagrange multiplier that prices discrepancy beyond its tolerance."""

import math
from collections import deque
from typing import Any, Literal, Self

from ..settings.ranges import AT_LEAST_0, COUNT, require_choice
from .settings import ConstraintSettings, DualAscent
from .tolerance import AUTO_BATCHES, proposed_tolerance


class LagrangeMultiplier:
    """Multiplier λ of the discrepancy constraint δ̄ ≤ ε, moved by projected dual ascent (arXiv 2606.08779, eqs. 9–11).

    After iteration k, λ_{k+1} = Π_[λ_min, λ_max]( λ_k + η_λ (δ̄_k − ε) ), where δ̄_k is the mean discrepancy of the
    iteration, or of the last ``window`` iterations (the paper's dynamic buffer). This is ``dual="paper"``.

    ``"auto"`` takes the relative violation v_k = min(δ̄_k/ε − 1, 1) in place of δ̄_k − ε: it has no unit, and a step is
    at most η_λ. ``"pid"`` (arXiv 2007.03964) moves an integral I in this way, and
    λ_{k+1} = Π( I_{k+1} + K_P v_k + K_D max(v_k − v_{k−1}, 0) ).

    Args:
        init: λ_0, within [minimum, maximum].
        lr: step size η_λ ≥ 0 of the dual ascent, in units of λ per unit of discrepancy.
        tolerance: ε ≥ 0, the mean discrepancy up to which the policy explores freely. With ``"auto"``, λ stays
            unchanged for the first ten iterations, and `proposed_tolerance` of their δ̄ is ε from then on.
        minimum: λ_min ≥ 0.
        maximum: λ_max ≥ λ_min. The paper's penalty only pushes sampled tokens down, which can itself raise the
            discrepancy, so an unbounded λ can run away.
        window: number of iterations that δ̄ is averaged over, ≥ 1.
        dual: ``"paper"``, ``"auto"`` or ``"pid"``, see above. The latter two need a tolerance above 0.
        proportional, derivative: K_P ≥ 0 and K_D ≥ 0 of ``"pid"``, in units of λ.

    Attributes:
        tolerance (`float` or `None`): ε; `None` until ``"auto"`` has found it.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    def __init__(
        self,
        init: float = 0.1,
        lr: float = 1.0,
        tolerance: float | Literal["auto"] = 0.0037,
        minimum: float = 0.0,
        maximum: float = 1.0,
        window: int = 1,
        dual: DualAscent = "paper",
        proportional: float = 0.0,
        derivative: float = 0.0,
    ):
        require_choice("dual", dual, DualAscent)
        fixed = None if tolerance == "auto" else tolerance
        numbers = {"lr": lr, "minimum": minimum, "maximum": maximum} | ({} if fixed is None else {"tolerance": fixed})
        numbers |= {"proportional": proportional, "derivative": derivative}
        for name, value in numbers.items():
            if not AT_LEAST_0.allows(value):
                raise ValueError(f"{name}={value!r} is invalid: use a finite number that is at least 0.")
        if not minimum <= init <= maximum:
            raise ValueError(f"init={init!r} lies outside [{minimum!r}, {maximum!r}]: choose one within the bounds.")
        if not COUNT.allows(window):
            raise ValueError(f"window={window!r} is invalid: use a whole number of iterations, at least 1.")
        if fixed == 0 and dual != "paper":
            raise ValueError(f"tolerance={fixed!r} has no relative violation, by which dual={dual!r} moves: raise it.")
        self.lr = lr
        self.tolerance = fixed
        self.minimum = minimum
        self.maximum = maximum
        self._dual = dual
        self._gains = (proportional, derivative)
        self._value = self._integral = float(init)
        self._violation: float | None = None  # the latest one
        self._recent: deque[float] = deque(maxlen=window)
        # δ̄ of the iterations that ε is computed from; None where ε is given.
        self._observed: list[float] | None = [] if fixed is None else None

    @classmethod
    def of(cls, settings: ConstraintSettings) -> Self:
        """Return a new multiplier at `lambda_init`, where it stays unless it is updated (`constraint="static"`)."""
        return cls(
            init=settings.lambda_init,
            lr=settings.lambda_lr,
            tolerance=settings.discrepancy_tolerance,
            minimum=settings.lambda_min,
            maximum=settings.lambda_max,
            window=settings.dual_window,
            dual=settings.dual,
            proportional=settings.lambda_kp or 0.0,
            derivative=settings.lambda_kd or 0.0,
        )

    @property
    def value(self) -> float:
        """The present λ."""
        return self._value

    def update(self, mean_discrepancy: float) -> float:
        """Take one step of dual ascent from the mean discrepancy δ̄_k of an iteration, and return the new λ.

        Raises:
            ValueError: ``mean_discrepancy`` is negative or not finite. An iteration without a scored token has no mean
                discrepancy: do not update after it.
        """
        if not math.isfinite(mean_discrepancy) or mean_discrepancy < 0:
            raise ValueError(
                f"mean_discrepancy={mean_discrepancy!r} is no discrepancy: pass a finite mean that is at least 0, and "
                "skip the update after an iteration without a scored token."
            )
        if self.tolerance is None:
            assert self._observed is not None
            self._observed.append(float(mean_discrepancy))
            if len(self._observed) == AUTO_BATCHES:
                self.tolerance = proposed_tolerance(self._observed)
            return self._value
        self._recent.append(float(mean_discrepancy))
        violation = math.fsum(self._recent) / len(self._recent) - self.tolerance
        if self._dual != "paper":
            # "auto" finds ε = 0 where the engines never differed: any difference then violates it.
            violation = min(violation / self.tolerance, 1.0) if self.tolerance else float(violation > 0)
        self._integral = self._projected(self._integral + self.lr * violation)
        self._value = self._integral
        if self._dual == "pid":
            proportional, derivative = self._gains
            rise = 0.0 if self._violation is None else max(violation - self._violation, 0.0)
            self._value = self._projected(self._integral + proportional * violation + derivative * rise)
        self._violation = violation
        return self._value

    def _projected(self, value: float) -> float:
        return min(max(value, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, Any]:
        """Return λ, the window's discrepancies and those that ε is computed from, as JSON values, without settings."""
        pid = {"integral": self._integral, "violation": self._violation}
        return {"value": self._value, "recent": list(self._recent), "observed": self._observed} | pid

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. λ is projected onto the present bounds, and the window keeps its latest."""
        value = float(state_dict["value"])
        if not math.isfinite(value):
            raise ValueError(f"state_dict['value']={value!r} is not finite: the state is corrupt.")
        self._value = self._projected(value)
        self._integral = self._projected(float(state_dict["integral"]))
        self._violation = state_dict["violation"]
        self._recent = deque(map(float, state_dict["recent"]), maxlen=self._recent.maxlen)
        if self._observed is not None:
            self._observed = list(state_dict["observed"] or [])
            self.tolerance = proposed_tolerance(self._observed) if len(self._observed) == AUTO_BATCHES else None
