"""What a calibration found: by engine and side by side, saved and loaded."""

import os
from typing import Any, NamedTuple

from ..records.estimators import Difference, Estimate
from ..records.results import read_result, write_result


CALIBRATION_FILE = "calibration.json"
HISTOGRAM_EDGES = tuple(10.0 ** (power / 4) for power in range(-32, 17))  # of δ; what lies outside is in the end bins
GRID = 100  # cells along each axis of the picture of both probabilities


class Bin(NamedTuple):
    """Mean δ of the tokens with low ≤ x < high; NaN where there are none, or for the error of a single prompt."""

    low: float
    high: float
    tokens: int
    mean: float
    standard_error: float


class Weights(NamedTuple):
    """Importance weights of trajectories; `ess` is (Σw)²/(nΣw²), the effective sample size as a part of n."""

    mean: float
    percentiles: dict[str, float]
    maximum: float
    ess: float


class Growth(NamedTuple):
    """Weights of the first `tokens` tokens of each trajectory, or of all where it is shorter."""

    tokens: int
    mean: float
    log_std: float  # of log w
    low: float  # 5th percentile
    high: float  # 95th percentile
    ess: float


class TokenContext(NamedTuple):
    """A token with what stands around it. White space and control characters are made visible."""

    prompt: int
    sample: int
    position: int  # in the completion, from 0
    token: str
    before: str
    after: str
    train: float  # π_train
    infer: float  # π_inf
    delta: float


class Tolerance(NamedTuple):
    """The proposed ε with its 95 % interval, and δ̄ of the generation batches that the rule saw."""

    value: float
    low: float
    high: float
    batch_mean: float
    batch_std: float

    @property
    def config_line(self) -> str:
        """The line of a training configuration."""
        return f"discrepancy_tolerance: {self.value:#.3g}"


class LayerDifference(NamedTuple):
    """How far the hidden states behind a layer are apart in the policy's forward and in its deployed form's.

    Attributes:
        relative: Σ ‖h_deployed − h_policy‖ / Σ ‖h_policy‖ over tokens.
        flipped: share of tokens that go to another set of experts there; None for a layer without a router.
    """

    relative: Estimate
    flipped: Estimate | None


class Split(NamedTuple):
    """δ̄ by its causes; see `dc_trl.calibration.split`.

    Attributes:
        whole: δ̄.
        shares: by cause, what of δ̄ goes away with it, on average over all orders of removal.
        unexplained: δ̄ where all causes are removed; the shares and it add up to the whole.
        left: δ̄ where the named causes are removed, joined by " + "; "" where none is.
    """

    whole: Estimate
    shares: dict[str, Estimate]
    unexplained: Estimate
    left: dict[str, Estimate]


class Diagnosis(NamedTuple):
    """Where an engine's δ̄ comes from; see `dc_trl.calibration.doctor`.

    Attributes:
        scheme: that the engine was taken for.
        split: of δ̄.
        vocabulary: KL(deployed ‖ policy) in nats, total variation and share of flipped argmaxes as `kl`,
            `total_variation` and `top1_flips`: means over tokens of comparisons of the whole vocabulary.
        layers: from the embedding's output to that of the last layer.
        advice: what to do, and why.
    """

    scheme: str
    split: Split
    vocabulary: dict[str, Estimate]
    layers: list[LayerDifference]
    advice: list[str]


class EngineMismatch(NamedTuple):
    """What was measured of one engine."""

    engine: str
    precision: str
    prompts: int
    completions: int
    tokens: int
    unscored: int  # tokens without a finite log-probability from both sides; they count nowhere
    empty: int  # completions without a token
    truncated: int  # completions that the limit of tokens cut off
    estimates: dict[str, Estimate]  # δ̄ as `discrepancy`, the token mean of δ as `delta`, and metrics
    percentiles: dict[str, float]  # of δ
    maximum: float  # of δ
    histogram: list[int]  # tokens by δ, between `HISTOGRAM_EDGES`
    by_position: list[Bin]
    by_probability: list[Bin]  # of π_inf
    joint: list[list[int]]  # [cell of π_inf, cell of π_train, tokens] on a grid of `GRID` × `GRID`
    worst: list[TokenContext]
    metrics: dict[str, float]  # of `mismatch_metrics`
    train_perplexity: float  # exp of the mean −log π over tokens
    infer_perplexity: float
    sequence_weights: Weights  # exp(Σ_t d)
    geometric_weights: Weights  # exp(mean_t d)
    growth: list[Growth]  # of the sequence weights, with length
    tolerance: Tolerance
    per_prompt: list[list[float]]  # numerator and denominator of δ̄, for each prompt
    notes: list[str]  # what a reader has to know before believing the numbers
    diagnosis: Diagnosis | None = None  # where the engine's scheme is known, and the split was asked for


class Calibration(NamedTuple):
    """One or more engines measured on the same prompts. `differences` are of δ̄, each engine's minus the first's."""

    settings: dict[str, Any]
    engines: list[EngineMismatch]
    differences: dict[str, Difference]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON; what is not finite becomes null."""
        write_result(self, path, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Reads what `save` wrote; null becomes NaN, but for a p-value.

        Raises:
            ValueError: there is no such file, or it holds no calibration.
        """
        return read_result(cls, path, "calibration", null_is_nan=True)
