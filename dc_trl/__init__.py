"""DC-GRPO on TRL: measure, constrain and deploy under the training-inference discrepancy."""

from .config import DCGRPOConfig
from .discrepancy import mismatch_metrics, token_discrepancy
from .lagrangian import LagrangeMultiplier
from .trainer import DCGRPOTrainer


__version__ = "0.1.0"

__all__ = [
    "DCGRPOConfig",
    "DCGRPOTrainer",
    "LagrangeMultiplier",
    "mismatch_metrics",
    "token_discrepancy",
]
