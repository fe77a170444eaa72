"""The multiplier λ that settings describe."""

from .lagrangian import LagrangeMultiplier
from .settings import ConstraintSettings


def multiplier_of(settings: ConstraintSettings) -> LagrangeMultiplier:
    """Return a new multiplier of dual ascent; it is constant where nobody updates it (`constraint="static"`)."""
    return LagrangeMultiplier(
        init=settings.lambda_init,
        lr=settings.lambda_lr,
        tolerance=settings.discrepancy_tolerance,
        minimum=settings.lambda_min,
        maximum=settings.lambda_max,
        window=settings.dual_window,
    )
