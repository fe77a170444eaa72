"""Which signal of a run's first steps says that it will lose: that its policy ends below where it began.

    python scripts/study/early_signs.py docs/study.jsonl scripts/study/second_part/lines.jsonl
    python scripts/study/early_signs.py docs/study.jsonl … --on scripts/study/second_part/confirmed_lag.jsonl

A run loses where the mean of its last three evaluations (greedy, deployed) is below that before training. AUC is the
probability that the signal of a run that will lose is above that of one that will not, ties counted half. Its 95 %
interval comes from 500 draws of cells, because the seeds of a cell are alike. Above the threshold lie 5 % of the runs
that do not lose. `--on` applies the thresholds of the first files to runs that had no part in them.

The second table has the rules of the collapse alarm, and some that it does not have, on the means of twelfths. A drop
of the reward is one from the best twelfth before, by 30 % and by a number of standard deviations of a single step.
The third has the alarm itself, on the logs of runs whose lines have kept what it said.
"""

import math
import random
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lines import PRIMARY, Line, read_lines
from tables import NONE, Table

from dc_trl.records.tables import markdown_table
from dc_trl.settings.command_line import OptionParser, refused_in_one_line


AFTER = (1, 2, 3, 4)  # twelfths of a run
FALSE_ALARMS = 0.05
DRAWS = 500

Signal: TypeAlias = Callable[[Line, int], float | None]


def _curve(name: str, sign: int = 1) -> Signal:
    def signal(line: Line, window: int) -> float | None:
        values = line.curves.get(name)
        return None if not values or values[window] is None else sign * values[window]

    return signal


def _reward_fall(line: Line, window: int) -> float | None:
    first, now = (_curve("reward")(line, each) for each in (0, window))
    return None if first is None or now is None else first - now


# Each by its mean over one twelfth of the run; higher is worse.
SIGNALS: dict[str, Signal] = {
    "k3": _curve("k3"),
    "lag's k3": _curve("lag_k3"),
    "δ̄": _curve("discrepancy"),
    "reward, low": _curve("reward", -1),
    "reward's fall since the first twelfth": _reward_fall,
    "entropy": _curve("entropy"),
    "gradient norm": _curve("grad_norm"),
    "length": _curve("length"),
}


NOISE = 0.07  # standard deviation of a step's mean reward on this bench, of which histories have 0.06 to 0.09

Change: TypeAlias = Callable[[Sequence[float]], bool]


def _drop(deviations: float) -> Change:
    def change(values: Sequence[float]) -> bool:
        best = max(values[:-1])
        return values[-1] <= best - max(0.3 * best, deviations * NOISE)

    return change


# Each by a curve, and by what its twelfths so far show.
CHANGES: dict[str, tuple[str, Change]] = {
    **{f"the reward falls by 30 % and {deviations} σ": ("reward", _drop(deviations)) for deviations in (1, 2, 3, 4)},
    "δ̄ rises to 5 times its first": ("discrepancy", lambda values: values[-1] >= 5 * values[0]),
    "the gradient norm rises to 10 times its first, and 1": (
        "grad_norm",
        lambda values: values[-1] >= max(10 * values[0], 1.0),
    ),
    "the entropy rises to 3 times its first, and 1 nat": (
        "entropy",
        lambda values: values[-1] >= max(3 * values[0], 1.0),
    ),
    "the entropy falls to a tenth of its first, and 0.02 nats": (
        "entropy",
        lambda values: values[-1] <= min(values[0] / 10, 0.02),
    ),
}
ALARM = "the reward falls by 30 % and 2 σ"


class Judged(NamedTuple):
    """The signal of a run, whether it loses, and its cell."""

    value: float
    loses: bool
    cell: str


def loses(line: Line) -> bool | None:
    """Return whether a run ends below its start; None where it was not evaluated before training."""
    start, end = line.evaluations[PRIMARY].get(0), line.last(PRIMARY)
    return None if start is None or end is None else end < start


def judged(lines: Sequence[Line], signal: Signal, window: int) -> list[Judged]:
    """Return what a signal of a twelfth, counted from 0, says of each run that has it."""
    found = ((signal(line, window), loses(line), line.key[0]) for line in lines)
    return [Judged(value, lost, cell) for value, lost, cell in found if value is not None and lost is not None]


def auc(runs: Sequence[Judged]) -> float | None:
    """Return the area under the ROC curve; None where all runs lose, or none does."""
    kept = sorted(run.value for run in runs if not run.loses)
    lost = [run.value for run in runs if run.loses]
    if not kept or not lost:
        return None
    below = sum(bisect_left(kept, value) + bisect_right(kept, value) for value in lost)
    return below / (2 * len(kept) * len(lost))


def interval(runs: Sequence[Judged]) -> tuple[float, float]:
    """Return the 95 % interval of the AUC, by draws of whole cells."""
    cells = defaultdict(list)
    for run in runs:
        cells[run.cell].append(run)
    rng = random.Random(0)
    draws = ([run for cell in rng.choices(list(cells.values()), k=len(cells)) for run in cell] for _ in range(DRAWS))
    found = sorted(area for area in map(auc, draws) if area is not None)
    return found[round(0.025 * len(found))], found[round(0.975 * len(found)) - 1]


def threshold(runs: Sequence[Judged]) -> float:
    """Return the value above which at most 5 % of the runs lie that do not lose."""
    kept = sorted(run.value for run in runs if not run.loses)
    return kept[len(kept) - 1 - int(FALSE_ALARMS * len(kept))]


def share_above(runs: Sequence[Judged], level: float, lost: bool) -> float:
    """Return the share of the runs that lose, or of those that do not, whose signal is above a level."""
    return statistics.fmean(run.value > level for run in runs if run.loses == lost)


def signs_table(lines: Sequence[Line], others: Sequence[Line]) -> Table:
    """Return what each signal says of the runs of `others` that have it, with thresholds of the runs of `lines`.

    Raises:
        ValueError: all of these runs lose, or none does.
    """
    rows = []
    for name, signal in SIGNALS.items():
        for after in AFTER:
            runs, fitted = judged(others, signal, after - 1), judged(lines, signal, after - 1)
            if not runs:
                continue
            area = auc(runs)
            if area is None:
                raise ValueError("All of these runs lose, or none does: give lines of runs of both kinds.")
            low, high = interval(runs)
            above = [NONE] * 3
            if fitted:
                level = threshold(fitted)
                above = [f"{level:.3g}", *(f"{share_above(runs, level, lost):.0%}" for lost in (True, False))]
            rows.append([name, f"{after}/12", f"{area:.2f} [{low:.2f}, {high:.2f}]", *above])
    return ["signal", "mean over", "AUC", "threshold", "lost runs above it", "others above it"], rows


def first_change(line: Line, curve: str, change: Change) -> int | None:
    """Return the first twelfth, counted from 1, after which a curve shows a change; None where none does."""
    values = [value for value in line.curves.get(curve, []) if value is not None]
    return next((end for end in range(2, len(values) + 1) if change(values[:end])), None)


def changes_table(lines: Sequence[Line]) -> Table:
    """Return in how many runs of the shipped model each change shows, and how many steps after the start.

    The noise is that of this model's task and batch.
    """
    runs = {True: list[Line](), False: list[Line]()}
    for line in lines:
        if (lost := loses(line)) is not None and "model_name_or_path" not in line.cell and "reward" in line.curves:
            runs[lost].append(line)
    shown = {
        (name, lost): {line.key: at for line in runs[lost] if (at := first_change(line, *change)) is not None}
        for name, change in CHANGES.items()
        for lost in runs
    }
    rows = []
    for name in CHANGES:
        after = shown[name, True]
        sooner = sum(at < shown[ALARM, True].get(key, math.inf) for key, at in after.items())
        twelfth = f"{statistics.median(after.values()):g}/12" if after else NONE
        shares = [f"{len(shown[name, lost])} of {len(runs[lost])}" for lost in runs]
        rows.append([name, *shares, twelfth, str(sooner)])
    return ["change", "lost runs", "others", "median, after", f"lost runs before, or without, {ALARM}"], rows


def alarms_table(lines: Sequence[Line]) -> Table:
    """Return in how many runs each signal of the collapse alarm rings, and how many steps before the end."""
    runs = {True: list[Line](), False: list[Line]()}
    notice = defaultdict[str, dict[bool, list[int]]](lambda: {lost: [] for lost in runs})  # steps, by the signal
    for line in lines:
        if (lost := loses(line)) is not None and line.alarms is not None:
            runs[lost].append(line)
            for name, step in line.alarms.items():
                notice[name][lost].append(max(line.evaluations[PRIMARY]) - step)
    rows = []
    for name, found in sorted(notice.items()):
        shares = [f"{len(found[lost])} of {len(runs[lost])}" for lost in runs]
        rows.append([name, *shares, f"{statistics.median(found[True]):g}" if found[True] else NONE])
    return ["alarm", "lost runs", "others", "steps before the end, median"], rows


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("lines", type=Path, nargs="+", help="raw lines of runs")
    parser.add_argument("--on", type=Path, help="raw lines of runs to which the thresholds of the others are applied")
    args = parser.parse_args()
    with refused_in_one_line():
        lines = [line for path in args.lines for line in read_lines(path)]
        others = lines if args.on is None else read_lines(args.on)
        known = [loses(line) for line in others]
        print(f"{len(known) - known.count(None)} runs, of which {known.count(True)} lose\n")
        print(markdown_table(*signs_table(lines, others)))
        print(markdown_table(*changes_table(others)), end="")
        if any(line.alarms is not None for line in others):
            print("\n" + markdown_table(*alarms_table(others)), end="")


if __name__ == "__main__":
    main()
