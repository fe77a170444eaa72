"""A calibration for its readers: tables in the terminal."""

from collections.abc import Callable

from ..records.estimators import Estimate
from ..records.tables import TableRows, print_table
from ..version import DOCS
from .result import Calibration, Diagnosis, EngineMismatch, Tolerance


_SHOWN = ("50", "90", "99", "99.9")  # percentiles


def summary_table(calibration: Calibration) -> TableRows:
    """Return the engines side by side, a column for each; brackets hold 95 % intervals over prompts."""
    rows: list[tuple[str, Callable[[EngineMismatch], str]]] = [
        ("proposed ε", lambda e: _interval(e.tolerance)),
        ("δ̄ of a batch", lambda e: _interval(e.estimates["discrepancy"])),
        ("δ, percentiles 50 / 90 / 99 / 99.9", lambda e: " / ".join(f"{e.percentiles[p]:.2g}" for p in _SHOWN)),
        ("KL(π_inf ‖ π_train), k3, nats", lambda e: _interval(e.estimates["k3_kl"])),
        ("floor of the lag's k3, nats", lambda e: _known(e.estimates.get("lag_floor"))),
        ("Pearson of probabilities", lambda e: "–" if e.pearson is None else f"{e.pearson:.6f}"),
        ("tokens", lambda e: f"{e.tokens:,}"),
        ("completions cut off", lambda e: f"{e.truncated / e.completions:.1%}"),
    ]
    head = ["", *(engine.engine for engine in calibration.engines)]
    return head, [[name, *(cell(engine) for engine in calibration.engines)] for name, cell in rows]


def split_table(diagnosis: Diagnosis) -> TableRows:
    """Return the shares of δ̄, which add up to it, with their 95 % intervals, and below them the floor."""
    split = diagnosis.split

    def row(name: str, share: Estimate) -> list[str]:
        part = f"{share.value / split.whole.value:.1%}" if split.whole.value else "–"
        return [name, f"{share.value:.2e}", f"[{share.low:.2e}, {share.high:.2e}]", part]

    rows = [row(cause, share) for cause, share in split.shares.items()]
    rows += [row("unexplained", split.unexplained), row("δ̄, the sum", split.whole)]
    return ["cause", "share", "95 %", "of δ̄"], [*rows, row("floor: another order of sums alone", split.floor)]


def print_calibration(calibration: Calibration) -> None:
    """Print the tables, the notes, ε for a constraint, and last what follows for each engine."""
    settings = calibration.settings
    print_table(*summary_table(calibration), f"{settings['model']}, δ by {settings['measure']}")
    for engine in calibration.engines:
        if engine.diagnosis is not None:
            print_table(*split_table(engine.diagnosis), f"{engine.engine}: where δ̄ comes from")
    for engine in calibration.engines:
        for note in engine.notes:
            print(f"NOTE, {engine.engine}: {note}")
    print(f"For constraint: lagrangian alone ({DOCS}/calibration.md, the rule for ε):")
    for engine in calibration.engines:
        print(f"  {engine.tolerance.config_line}  # {engine.engine}, measured on {settings['prompts']} prompts")
    for engine in calibration.engines:
        for advice in engine.diagnosis.advice if engine.diagnosis is not None else []:
            print(f"CONCLUSION, {engine.engine}: {advice}")


def _known(estimate: Estimate | None) -> str:
    return "–" if estimate is None else _interval(estimate)


def _interval(estimate: Estimate | Tolerance) -> str:
    return f"{estimate.value:#.3g}\n[{estimate.low:#.3g}, {estimate.high:#.3g}]"
