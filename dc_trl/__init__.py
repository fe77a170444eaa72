"""DC-GRPO on TRL: measure, constrain and deploy under the training-inference discrepancy."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .calibration import calibrate as calibrate
    from .callbacks.collapse import CollapseAlarmCallback as CollapseAlarmCallback
    from .callbacks.collapse import CollapseMonitor as CollapseMonitor
    from .callbacks.length_decay import LengthDecayCallback as LengthDecayCallback
    from .callbacks.length_decay import LengthDecaySchedule as LengthDecaySchedule
    from .callbacks.length_decay import SurgeDetector as SurgeDetector
    from .callbacks.mismatch import MismatchCallback as MismatchCallback
    from .config import DCGRPOConfig as DCGRPOConfig
    from .constraint.discrepancy import token_discrepancy as token_discrepancy
    from .constraint.lagrangian import LagrangeMultiplier as LagrangeMultiplier
    from .constraint.metrics import mismatch_metrics as mismatch_metrics
    from .evaluation import evaluate as evaluate
    from .grading.rewards import math_reward as math_reward
    from .run.deployment import DeploymentCheckpointCallback as DeploymentCheckpointCallback
    from .run.history import HistoryCallback as HistoryCallback
    from .trainer import DCGRPOTrainer as DCGRPOTrainer
    from .version import __version__ as __version__

# Where each public name lives. They are imported when they are used: TRL takes seconds, and a vLLM worker that reloads
# weights for us has no use for it.
_MODULES = {
    "CollapseAlarmCallback": "callbacks.collapse",
    "CollapseMonitor": "callbacks.collapse",
    "DCGRPOConfig": "config",
    "DCGRPOTrainer": "trainer",
    "DeploymentCheckpointCallback": "run.deployment",
    "HistoryCallback": "run.history",
    "LagrangeMultiplier": "constraint.lagrangian",
    "LengthDecayCallback": "callbacks.length_decay",
    "LengthDecaySchedule": "callbacks.length_decay",
    "MismatchCallback": "callbacks.mismatch",
    "SurgeDetector": "callbacks.length_decay",
    "__version__": "version",
    "calibrate": "calibration",
    "evaluate": "evaluation",
    "math_reward": "grading.rewards",
    "mismatch_metrics": "constraint.metrics",
    "token_discrepancy": "constraint.discrepancy",
}
__all__ = [*_MODULES]
# Names of earlier releases, with what they are called now.
_RENAMED = {"LambdaLoggingCallback": "HistoryCallback"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"{name} is called {_RENAMED[name]} now.", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
