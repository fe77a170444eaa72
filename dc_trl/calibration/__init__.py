"""Calibration before a run: the mismatch of each engine, its causes, and the tolerance ε to set.

The commands import it; it samples and scores by itself, and needs no trainer.
"""

from .measure import calibrate
from .result import Calibration, CalibrationSettings


__all__ = ["Calibration", "CalibrationSettings", "calibrate"]
