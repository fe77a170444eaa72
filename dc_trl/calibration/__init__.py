"""Calibration before a run: what each engine does to the probabilities of a model, and the tolerance ε to set."""

from .measure import calibrate
from .result import Calibration
from .settings import CalibrationSettings


__all__ = ["Calibration", "CalibrationSettings", "calibrate"]
