"""The multiplier λ that settings describe."""

from .balance import BalancedMultiplier
from .lagrangian import LagrangeMultiplier
from .settings import ConstraintSettings


def multiplier_of(settings: ConstraintSettings) -> LagrangeMultiplier | BalancedMultiplier:
    """A new multiplier, at `lambda_init`: the one of dual ascent, unless `constraint="balance"` asks for its own."""
    if settings.constraint == "balance":
        return BalancedMultiplier(
            init=settings.lambda_init,
            share=settings.balance_share,
            decay=settings.balance_decay,
            minimum=settings.lambda_min,
            maximum=settings.lambda_max,
            tolerance=None if settings.discrepancy_tolerance == "auto" else settings.discrepancy_tolerance,
        )
    return lagrange_multiplier_of(settings)


def lagrange_multiplier_of(settings: ConstraintSettings) -> LagrangeMultiplier:
    """The multiplier of dual ascent; constant where nobody updates it (`constraint="static"`)."""
    return LagrangeMultiplier(
        init=settings.lambda_init,
        lr=settings.lambda_lr,
        tolerance=settings.discrepancy_tolerance,
        minimum=settings.lambda_min,
        maximum=settings.lambda_max,
        window=settings.dual_window,
    )
