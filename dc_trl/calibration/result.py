"""What a calibration found: by engine and side by side, saved and loaded."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import write_text
from ..records.estimators import Estimate


CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class Tolerance:
    """The proposed ε with its 95 % interval, and mean and standard deviation of δ̄ over generation batches."""

    value: float
    low: float
    high: float
    batch_mean: float
    batch_std: float

    @property
    def config_line(self) -> str:
        """The line of a training configuration."""
        return f"discrepancy_tolerance: {self.value:#.3g}"


@dataclass(frozen=True)
class Split:
    """δ̄ by its causes; see `dc_trl.calibration.causes`. The shares and what is unexplained add up to the whole."""

    whole: Estimate  # δ̄
    shares: dict[str, Estimate]  # by cause, what goes away with it, on average over all orders of removal
    unexplained: Estimate  # δ̄ where all causes are removed
    floor: Estimate  # what of δ̄ an engine with any other order of float32 sums would have


@dataclass(frozen=True)
class Diagnosis:
    """Where an engine's δ̄ comes from: the scheme that it was taken to be in, the causes, and what to do about them."""

    scheme: str
    split: Split
    advice: list[str]


@dataclass(frozen=True)
class EngineMismatch:
    """What was measured of one engine."""

    engine: str
    precision: str
    prompts: int
    completions: int
    tokens: int
    truncated: int  # completions that the limit of tokens cut off
    # δ̄ as `discrepancy`, KL(π_inf ‖ π_train) as `k3_kl` and, where the split was asked for, `lag_floor`.
    estimates: dict[str, Estimate]
    percentiles: dict[str, float]  # of δ
    pearson: float | None  # correlation of the probabilities of both sides; None where one side has but one
    tolerance: Tolerance
    notes: list[str]  # what a reader should know before relying on the numbers
    diagnosis: Diagnosis | None = None  # where the engine's scheme is known, and the split was asked for


@dataclass(frozen=True)
class Calibration:
    """One or more engines measured on the same prompts."""

    settings: dict[str, Any]
    engines: list[EngineMismatch]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON."""
        write_text(Path(path), json.dumps(asdict(self), indent=1) + "\n")
