"""DC-GRPO on TRL: measure, constrain and deploy under the training-inference discrepancy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .calibration import calibrate
    from .callbacks import DeploymentCheckpointCallback, LambdaLoggingCallback, LengthDecayCallback
    from .collapse import CollapseMonitor
    from .collapse_callback import CollapseAlarmCallback
    from .config import DCGRPOConfig
    from .discrepancy import mismatch_metrics, token_discrepancy
    from .evaluation import evaluate
    from .lagrangian import LagrangeMultiplier
    from .lr_schedule import LengthDecaySchedule, SurgeDetector
    from .rewards import math_reward
    from .trainer import DCGRPOTrainer
    from .version import __version__

# Where each public name lives. They are imported when they are used: TRL takes seconds, and a vLLM worker that reloads
# weights for us has no use for it.
_MODULES = {
    "CollapseAlarmCallback": "collapse_callback",
    "CollapseMonitor": "collapse",
    "DCGRPOConfig": "config",
    "DCGRPOTrainer": "trainer",
    "DeploymentCheckpointCallback": "callbacks",
    "LagrangeMultiplier": "lagrangian",
    "LambdaLoggingCallback": "callbacks",
    "LengthDecayCallback": "callbacks",
    "LengthDecaySchedule": "lr_schedule",
    "SurgeDetector": "lr_schedule",
    "__version__": "version",
    "calibrate": "calibration",
    "evaluate": "evaluation",
    "math_reward": "rewards",
    "mismatch_metrics": "discrepancy",
    "token_discrepancy": "discrepancy",
}
__all__ = [
    "CollapseAlarmCallback",
    "CollapseMonitor",
    "DCGRPOConfig",
    "DCGRPOTrainer",
    "DeploymentCheckpointCallback",
    "LagrangeMultiplier",
    "LambdaLoggingCallback",
    "LengthDecayCallback",
    "LengthDecaySchedule",
    "SurgeDetector",
    "__version__",
    "calibrate",
    "evaluate",
    "math_reward",
    "mismatch_metrics",
    "token_discrepancy",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
