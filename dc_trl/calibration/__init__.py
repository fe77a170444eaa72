"""Calibration before a run: the mismatch of each engine, its causes, and the tolerance ε to set.

The commands import it; it samples and scores by itself, and needs no trainer.
"""

from typing import TYPE_CHECKING, Any

from .result import Calibration, CalibrationSettings


if TYPE_CHECKING:
    from .measure import calibrate as calibrate

__all__ = ["Calibration", "CalibrationSettings", "calibrate"]


def __getattr__(name: str) -> Any:
    if name == "calibrate":  # it takes seconds to import, which the help of a command does not need
        from .measure import calibrate

        return calibrate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
