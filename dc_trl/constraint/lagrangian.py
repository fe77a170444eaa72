"""The Lagrange multiplier that prices discrepancy beyond its tolerance."""

import math
from collections import deque
from typing import Any, Literal, Self

from .settings import ConstraintSettings
from .tolerance import AUTO_BATCHES, proposed_tolerance


class LagrangeMultiplier:
    """Multiplier λ of the discrepancy constraint δ̄ ≤ ε, moved by projected dual ascent (arXiv 2606.08779, eqs. 9–11).

    After iteration k, λ_{k+1} = Π_[λ_min, λ_max]( λ_k + η_λ (δ̄_k − ε) ), where δ̄_k is the mean discrepancy of the
    iteration, or of the last ``window`` iterations (the paper's dynamic buffer).

    Args:
        init: λ_0, within [minimum, maximum].
        lr: step size η_λ ≥ 0 of the dual ascent, in units of λ per unit of discrepancy.
        tolerance: ε ≥ 0, the mean discrepancy up to which the policy explores freely. With ``"auto"``, λ stays
            unchanged for the first ten iterations, and `proposed_tolerance` of their δ̄ is ε from then on.
        minimum: λ_min ≥ 0.
        maximum: λ_max ≥ λ_min. The paper's penalty only pushes sampled tokens down, which can itself raise the
            discrepancy, so an unbounded λ can run away.
        window: number of iterations that δ̄ is averaged over, ≥ 1.

    Attributes:
        tolerance (`float` or `None`): ε; `None` until ``"auto"`` has found it.
    """

    def __init__(
        self,
        init: float = 0.1,
        lr: float = 1.0,
        tolerance: float | Literal["auto"] = 0.0037,
        minimum: float = 0.0,
        maximum: float = 1.0,
        window: int = 1,
    ):
        self.lr = lr
        self.tolerance = None if tolerance == "auto" else tolerance
        self.minimum = minimum
        self.maximum = maximum
        self._of: list[str] | None = None  # what λ multiplies and what moves it, where a run's settings say so
        self._value = float(init)
        self._recent: deque[float] = deque(maxlen=window)
        # δ̄ of the iterations that ε is computed from; None where ε is given.
        self._observed: list[float] | None = [] if tolerance == "auto" else None

    @classmethod
    def of(cls, settings: ConstraintSettings) -> Self:
        """Return a new multiplier at `lambda_init`, where it stays unless it is updated (`constraint="static"`)."""
        multiplier = cls(
            init=settings.lambda_init,
            lr=settings.lambda_lr,
            tolerance=settings.discrepancy_tolerance,
            minimum=settings.lambda_min,
            maximum=settings.lambda_max,
            window=settings.dual_window,
        )
        names = ("constraint", "constraint_form", "discrepancy_measure", "constraint_target")
        multiplier._of = [getattr(settings, name) for name in names]
        return multiplier

    @property
    def value(self) -> float:
        """The present λ."""
        return self._value

    def update(self, mean_discrepancy: float) -> float:
        """Take one step of dual ascent from the mean discrepancy δ̄_k of an iteration, and return the new λ.

        Raises:
            ValueError: ``mean_discrepancy`` is not finite.
        """
        if not math.isfinite(mean_discrepancy):
            raise ValueError(f"mean_discrepancy={mean_discrepancy!r} is not finite: skip the update of such a batch.")
        if self.tolerance is None:
            assert self._observed is not None
            self._observed.append(float(mean_discrepancy))
            if len(self._observed) == AUTO_BATCHES:
                self.tolerance = proposed_tolerance(self._observed)
            return self._value
        self._recent.append(float(mean_discrepancy))
        violation = math.fsum(self._recent) / len(self._recent) - self.tolerance
        self._value = self._projected(self._value + self.lr * violation)
        return self._value

    def _projected(self, value: float) -> float:
        return min(max(value, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, Any]:
        """Return λ, the window's discrepancies and those that ε is computed from, as JSON values, without settings."""
        return {"value": self._value, "recent": list(self._recent), "observed": self._observed, "of": self._of}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. λ is projected onto the present bounds, and the window keeps its latest.

        A λ that was found for another constraint, or that nothing moves, says nothing about the present one: it stays.
        """
        if self._of is not None and (self._of[0] != "lagrangian" or state_dict.get("of", self._of) != self._of):
            return
        self._value = self._projected(float(state_dict["value"]))
        self._recent = deque(map(float, state_dict["recent"]), maxlen=self._recent.maxlen)
        if self._observed is not None:
            self._observed = list(state_dict["observed"] or [])
            self.tolerance = proposed_tolerance(self._observed) if len(self._observed) == AUTO_BATCHES else None
