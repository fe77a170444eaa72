"""The settings of a calibration, and what it found: by engine and side by side, saved and printed."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ..constraint.settings import Measure, Reduction
from ..files import write_json
from ..records.estimators import Estimate
from ..records.tables import TableRows, print_table
from ..settings.fields import ABOVE_0, COUNT, SEED, require_fields, setting
from ..version import DOCS


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

    def of_whole(self, part: Estimate) -> str:
        """Return a part of δ̄ in percent, or a dash where δ̄ is 0."""
        return f"{part.value / self.whole.value:.1%}" if self.whole.value else "–"


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


# --- tables in the terminal


def summary_table(calibration: Calibration) -> TableRows:
    """Return the engines side by side, a column for each; brackets hold 95 % intervals over prompts."""
    rows: list[tuple[str, Callable[[EngineMismatch], str]]] = [
        ("proposed ε", lambda e: _interval(e.tolerance)),
        ("δ̄ of a batch", lambda e: _interval(e.estimates["discrepancy"])),
        (
            "δ, percentiles 50 / 90 / 99 / 99.9",
            lambda e: " / ".join(f"{each:.2g}" for each in e.percentiles.values()),
        ),
        ("KL(π_inf ‖ π_train), k3, nats", lambda e: _interval(e.estimates["k3_kl"])),
        ("floor of the lag's k3, nats", lambda e: _interval(e.estimates.get("lag_floor"))),
        ("Pearson of probabilities", lambda e: "–" if e.pearson is None else f"{e.pearson:.6f}"),
        ("tokens", lambda e: f"{e.tokens:,}"),
        ("completions cut off", lambda e: f"{e.truncated / e.completions:.1%}"),
    ]
    head = ["", *(engine.engine for engine in calibration.engines)]
    return head, [[name, *(cell(engine) for engine in calibration.engines)] for name, cell in rows]


def split_table(split: Split) -> TableRows:
    """Return the shares of δ̄, which add up to it, with their 95 % intervals."""
    shares = split.shares | {"unexplained": split.unexplained, "δ̄, the sum": split.whole}
    rows = [
        [cause, f"{share.value:.2e}", f"[{share.low:.2e}, {share.high:.2e}]", split.of_whole(share)]
        for cause, share in shares.items()
    ]
    return ["cause", "share", "95 %", "of δ̄"], rows


def print_calibration(calibration: Calibration) -> None:
    """Print the tables, the notes, ε for a constraint, and last what follows for each engine."""
    settings = calibration.settings
    print_table(*summary_table(calibration), f"{settings['model']}, δ by {settings['measure']}")
    for engine in calibration.engines:
        if engine.diagnosis is not None:
            split = engine.diagnosis.split
            print_table(*split_table(split), f"{engine.engine}: where δ̄ comes from")
            floor = split.floor
            print(
                f"The floor is {floor.value:.2e} [{floor.low:.2e}, {floor.high:.2e}], {split.of_whole(floor)} of δ̄. "
                "It is no share: an engine that adds up in another order than training keeps that much, whatever is "
                "set."
            )
    for engine in calibration.engines:
        for note in engine.notes:
            print(f"NOTE, {engine.engine}: {note}")
    print(f"For constraint: lagrangian alone ({DOCS}/calibration.md, the rule for ε):")
    for engine in calibration.engines:
        print(f"  {engine.tolerance.config_line}  # {engine.engine}, measured on {settings['prompts']} prompts")
    for engine in calibration.engines:
        for advice in engine.diagnosis.advice if engine.diagnosis is not None else []:
            print(f"CONCLUSION, {engine.engine}: {advice}")


def _interval(estimate: Estimate | Tolerance | None) -> str:
    return "–" if estimate is None else f"{estimate.value:#.3g}\n[{estimate.low:#.3g}, {estimate.high:#.3g}]"
