"""The settings of the constraint, without TRL: what reads the records of a run takes their defaults from here."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from ..settings.command_line import unknown_field
from ..settings.ranges import AT_LEAST_0, require_number


Measure = Literal["prob_diff", "prob_ratio", "log_prob"]
Level = Literal["token", "sequence"]
Reduction = Literal["sequence", "token"]
Constraint = Literal["none", "static", "lagrangian"]
# Forms that compare the policy with its quantized self, in the loss.
TWO_SIDED = ("two_sided_kl", "two_sided_l1")
# Forms that push down each sampled token that differs, whichever engine gives it the larger probability.
PUSHES = ("injected",)
# Allowed values by field.
CHOICES = {
    "constraint": Constraint,
    "discrepancy_measure": Measure,
    "discrepancy_level": Level,
    "batch_reduction": Reduction,
}
if TYPE_CHECKING:
    Tolerance = float | Literal["auto"]
else:
    # TrlParser reads a field of several types as text; `DCGRPOConfig` converts it to a number.
    Tolerance = str


@dataclass
class ConstraintSettings:
    """Fields of the constraint, which [`~dc_trl.DCGRPOConfig`] describes."""

    constraint: Constraint = "none"
    constraint_form: str = "injected"
    discrepancy_measure: Measure = "prob_diff"
    discrepancy_level: Level = "token"
    discrepancy_tolerance: Tolerance = 0.0037
    discrepancy_margin: float = 0.0
    batch_reduction: Reduction = "sequence"
    dual_window: int = 1
    lambda_init: float = 0.1
    lambda_lr: float = 1.0
    lambda_min: float = 0.0
    lambda_max: float = 1.0
    rollout_correction: str = "none"
    rollout_correction_max: float | None = None
    rollout_correction_min: float | None = None
    deployment_scheme: str | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "ConstraintSettings":
        """Refuse a misspelt field with the nearest name; Python would only say that it is unexpected."""
        known = [field.name for field in fields(cls) if field.init]
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_field(name, known))
        return super().__new__(cls)

    @property
    def compared_by(self) -> str | None:
        """Name of the setting that makes the trainer act on the discrepancy; None where it is only measured.

        Such a setting needs the rollouts' log-probabilities, and an engine that samples from the policy's
        distribution.
        """
        return next((name for name in ("constraint", "rollout_correction") if getattr(self, name) != "none"), None)

    @property
    def comparison(self) -> str:
        """`compared_by` with its value, for messages; empty where it is None."""
        return "" if self.compared_by is None else f"{self.compared_by}={getattr(self, self.compared_by)!r}"


def read_tolerance(value: Any) -> float | Literal["auto"]:
    """Return the value of `discrepancy_tolerance`, which a parser may pass as text.

    Raises:
        ValueError: it is neither a finite number that is at least 0 nor "auto".
    """
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(
                f"discrepancy_tolerance={value!r} is invalid: use a finite number that is at least 0, or 'auto'."
            ) from None
    require_number("discrepancy_tolerance", value, AT_LEAST_0)
    return value
