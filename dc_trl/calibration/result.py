"""The settings of a calibration, and what it found: by engine and side by side, saved and loaded."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ..constraint.settings import Measure, Reduction
from ..files import write_json
from ..records.estimators import Estimate
from ..settings.fields import require_fields, setting
from ..settings.ranges import ABOVE_0, COUNT, SEED


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
        write_json(Path(path), asdict(self))


@dataclass(frozen=True)
class CalibrationSettings:
    """How engines are measured: the keywords of `calibrate`. A value out of its range raises a ValueError."""

    samples: Annotated[int, COUNT] = setting(
        8, "completions of each prompt, at least 1; use num_generations of the run"
    )
    max_tokens: Annotated[int, COUNT] = setting(
        8192, "tokens of the longest completion, at least 1; use max_completion_length of the run"
    )
    # The whole distribution is sampled: no top-p, top-k or min-p.
    temperature: Annotated[float, ABOVE_0] = setting(1.0, "temperature of both engines, above 0; use that of the run")
    measure: Measure = setting("prob_diff", "measure of the discrepancy δ; use discrepancy_measure of the run")
    reduction: Reduction = setting("sequence", "how δ is averaged to δ̄; use batch_reduction of the run")
    batch_prompts: Annotated[int, COUNT] = setting(64, "prompts of one generation batch of the run, at least 1")
    bf16: bool = setting(True, "whether the model is scored under bfloat16 autocast; use bf16 of the run")
    seed: Annotated[int, SEED] = setting(0, "seed of the completions and of the intervals")
    # The model goes there after the servers have ended, which may need the same GPU; None: it stays where it is.
    device: Any = setting(None, "device of scoring and of replicas")
    batch_tokens: Annotated[int, COUNT] = setting(
        16384, "tokens of one forward, padding included; a longer completion has a forward of its own"
    )
    # A scoring pass for each set of causes: 2, 4 or 8, and twice that for an FP8 KV cache, and for an adapter.
    split: bool = setting(True, "whether δ̄ is split into its causes where the engine's scheme is known")
    replica_batch: Annotated[int, COUNT] = setting(64, "completions that a replica samples at a time")
    chat_template_kwargs: Mapping[str, Any] | None = None  # `{"enable_thinking": False}` for example
    serve_options: Sequence[str] = ()  # further options of `vllm serve` for servers that are started
    settings: Mapping[str, Any] | None = None  # further entries for the record
    report: Callable[[str], None] = print  # takes a line about what is happening
    progress: bool = True  # whether to show bars

    def __post_init__(self) -> None:
        require_fields(self)
