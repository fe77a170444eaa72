"""DC-GRPO on TRL: measure, constrain and deploy under the training-inference discrepancy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .calibration import calibrate
    from .callbacks.collapse import CollapseAlarmCallback
    from .callbacks.collapse_monitor import CollapseMonitor
    from .callbacks.deployment import DeploymentCheckpointCallback
    from .callbacks.length_decay import LengthDecayCallback
    from .callbacks.lr_schedule import LengthDecaySchedule, SurgeDetector
    from .config import DCGRPOConfig
    from .constraint.discrepancy import token_discrepancy
    from .constraint.lagrangian import LagrangeMultiplier
    from .constraint.mismatch import mismatch_metrics
    from .evaluation import evaluate
    from .grading.rewards import math_reward
    from .trainer import DCGRPOTrainer
    from .trainers.history import LambdaLoggingCallback
    from .version import __version__

# Where each public name lives. They are imported when they are used: TRL takes seconds, and a vLLM worker that reloads
# weights for us has no use for it.
_MODULES = {
    "CollapseAlarmCallback": "callbacks.collapse",
    "CollapseMonitor": "callbacks.collapse_monitor",
    "DCGRPOConfig": "config",
    "DCGRPOTrainer": "trainer",
    "DeploymentCheckpointCallback": "callbacks.deployment",
    "LagrangeMultiplier": "constraint.lagrangian",
    "LambdaLoggingCallback": "trainers.history",
    "LengthDecayCallback": "callbacks.length_decay",
    "LengthDecaySchedule": "callbacks.lr_schedule",
    "SurgeDetector": "callbacks.lr_schedule",
    "__version__": "version",
    "calibrate": "calibration",
    "evaluate": "evaluation",
    "math_reward": "grading.rewards",
    "mismatch_metrics": "constraint.mismatch",
    "token_discrepancy": "constraint.discrepancy",
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
