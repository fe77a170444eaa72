"""Calibration before a run: the mismatch of each engine, its causes, and the tolerance ε to set."""

from .measure import calibrate
from .result import Calibration, CalibrationSettings


__all__ = ["Calibration", "CalibrationSettings", "calibrate"]
