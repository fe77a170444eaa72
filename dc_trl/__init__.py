"""DC-GRPO on TRL: measure, constrain and deploy under the training-inference discrepancy."""

from .callbacks import DeploymentCheckpointCallback, LambdaLoggingCallback
from .config import DCGRPOConfig
from .discrepancy import mismatch_metrics, token_discrepancy
from .lagrangian import LagrangeMultiplier
from .rewards import math_reward
from .trainer import DCGRPOTrainer
from .version import __version__


__all__ = [
    "DCGRPOConfig",
    "DCGRPOTrainer",
    "DeploymentCheckpointCallback",
    "LagrangeMultiplier",
    "LambdaLoggingCallback",
    "__version__",
    "math_reward",
    "mismatch_metrics",
    "token_discrepancy",
]
