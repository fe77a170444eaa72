"""The metrics that a batch logs: its mismatch, what a correction did, and the multiplier."""

from .balance import BalancedMultiplier
from .lagrangian import LagrangeMultiplier
from .statistics import MismatchReport


def batch_metrics(
    report: MismatchReport, multiplier: LagrangeMultiplier | BalancedMultiplier | None
) -> dict[str, float]:
    """Metrics by the names of docs/metrics.md.

    Args:
        report: of a batch with scored tokens.
        multiplier: λ that the batch was penalised with; None where the discrepancy is only measured.
    """
    metrics = {f"discrepancy/{name}": value for name, value in report.metrics().items()}
    metrics |= {f"trust/{name}": value for name, value in report.trust_metrics().items()}
    if multiplier is None:
        return metrics
    mean, tolerance = report.mean_discrepancy, multiplier.tolerance
    metrics["lagrangian/lambda"] = multiplier.value
    if tolerance is not None:
        metrics["lagrangian/tolerance"] = tolerance
        if mean is not None:
            metrics["lagrangian/violation"] = mean - tolerance
    if report.penalizes:
        metrics["lagrangian/penalty_mean"] = report.mean_penalty(multiplier.value)
        metrics["lagrangian/penalized_fraction"] = report.penalized_fraction
    return metrics
