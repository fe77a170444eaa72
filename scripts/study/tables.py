"""The tables of the study: where each variant of a sweep ends, and how it differs from reference and control.

The control of a run is GRPO in step in the same setting: the run without the mismatch.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from comparisons import (
    SIGNIFICANCE,
    Difference,
    confidence_interval,
    holm,
    mean_over_seeds,
    paired_t_test,
    sign_flip_p_value,
    unpaired_t_test,
)
from lines import PRIMARY, Line
from sweeps import Cell, Study, Sweep, Variant, by_value, cell_name

from dc_trl.records.tables import with_error


# Fields that a run has in common with its control: model, task, rate, batches, temperature, engine, device and its
# arithmetic. The rest makes mismatch or acts on it.
SETTING = {
    "model_name_or_path",
    "dataset_name",
    "max_completion_length",
    "learning_rate",
    "temperature",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "use_cpu",
    "bf16",
    "use_vllm",
    "vllm_mode",
    "vllm_max_model_length",
    "serve",
}
HEAD = [
    *("variant", "seeds", "greedy, %", "last one, %", "sampled, %", "trained, %"),
    *("difference, points", "p", "to GRPO in step", "δ̄, 10⁻³", "k3, 10⁻³", "entropy", "λ"),
    *("steps to 50 %", "seconds", "late reward, %", "late difference, points", "late p"),
]
COMPARED_HEAD = ["variant", "seeds", "greedy, %", "seeds, compared", "greedy, %, compared", "difference, points", "p"]
PAIRS_HEAD = [
    *("sweep", "first", "second", "seeds", "difference, points", "95 % interval"),
    *("p (t)", "p (sign flips)", "p (sign flips, corrected)"),
]
NONE = "–"  # a cell without a value

Table = tuple[list[str], list[list[str]]]  # head, rows
Controls = Mapping[str, Mapping[int, float]]  # accuracy, 0 to 1, by the name of the setting and the seed


def setting_of(line: Line) -> Cell:
    """Return what a run has in common with its control."""
    return {name: value for name, value in line.cell.items() if name in SETTING}


def is_control(line: Line) -> bool:
    """Tell whether a run is GRPO in step, sampled in the base's number format."""
    return line.cell == setting_of(line)


def controls_of(lines: Sequence[Line]) -> Controls:
    """Return the accuracy of GRPO in step in each setting.

    A setting where its mean over seeds is below the untrained model's has no control: GRPO fails there by itself.
    """
    before: dict[str, list[float]] = {}
    after: dict[str, dict[int, float]] = {}
    for line in filter(is_control, lines):
        reached = line.last(PRIMARY)
        if reached is not None:
            before.setdefault(cell_name(line.cell), []).append(line.evaluations[PRIMARY][0])
            after.setdefault(cell_name(line.cell), {})[line.seed] = reached
    return {
        name: found
        for name, found in after.items()
        if statistics.fmean(found.values()) >= statistics.fmean(before[name])
    }


def control_of(line: Line, controls: Controls) -> Mapping[int, float]:
    """Return the accuracy of a run's control by seed; {} where it has none."""
    return controls.get(cell_name(setting_of(line)), {})


@dataclass(frozen=True)
class SweepLines:
    """The lines of a sweep, by variant and seed, and the study's controls; variants without a line have none."""

    sweep: Sweep
    lines: Mapping[Variant, Mapping[int, Line]]
    controls: Controls

    def accuracy(self, variant: Variant) -> dict[int, float]:
        """Return the greedy accuracy of the deployed policy by seed, 0 to 1: the mean of the last evaluations."""
        found = {seed: line.last(PRIMARY) for seed, line in self.lines[variant].items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def comparisons(self) -> dict[Variant, Difference]:
        """Compare every other variant with the reference, over the seeds that both have.

        The p-values are corrected (Holm) for the number of comparisons of the sweep.
        """
        reference = self.accuracy(self.sweep.reference)
        tests = {
            variant: test
            for variant in self.sweep.variants
            if variant != self.sweep.reference and (test := _paired(self.accuracy(variant), reference)) is not None
        }
        return _corrected(tests)

    def against_control(self, variant: Variant) -> Difference | None:
        """Compare a variant with GRPO in step in its setting, over the seeds that both have; None where there is none.

        The comparison was not registered, and its p-value is not corrected for the number of comparisons.
        """
        lines = list(self.lines[variant].values())
        if not lines or is_control(lines[0]):
            return None
        return _paired(self.accuracy(variant), control_of(lines[0], self.controls))

    def _late_difference(self, variant: Variant) -> Difference | None:
        """Compare the training reward of the last quarter with the reference's; no p-value is corrected."""
        late = [
            {seed: reward for seed, line in self.lines[each].items() if (reward := line.late_reward) is not None}
            for each in (variant, self.sweep.reference)
        ]
        return None if variant == self.sweep.reference else _paired(*late)

    def table(self) -> Table:
        """Return a row for each variant: accuracies, differences to reference and control, and how the run went."""
        compared = self.comparisons()
        return HEAD, [self._row(variant, compared.get(variant)) for variant in self.sweep.variants]

    def _row(self, variant: Variant, compared: Difference | None) -> list[str]:
        lines = list(self.lines[variant].values())
        if not lines:
            return [variant.name, "0", *[NONE] * (len(HEAD) - 2)]
        halves = [line.steps_to_half for line in lines if line.steps_to_half is not None]
        late = self._late_difference(variant)
        to_half = f"{statistics.median(halves):.0f}" if len(halves) == len(lines) else f"{len(halves)} of {len(lines)}"
        return [
            variant.name,
            str(len(lines)),
            _cell(lines, lambda line: line.last(PRIMARY), 100, 1),
            _cell(lines, lambda line: line.last(PRIMARY, 1), 100, 1),
            _cell(lines, lambda line: line.last("sampled"), 100, 1),
            _cell(lines, lambda line: line.last("trained_greedy"), 100, 1),
            _points(compared),
            _p_value(compared and compared.p_value),
            _points(self.against_control(variant)),
            _cell(lines, lambda line: line.end("discrepancy"), 1e3, 2),
            _cell(lines, lambda line: line.end("k3"), 1e3, 2),
            _cell(lines, lambda line: line.end("entropy"), 1, 3),
            _cell(lines, lambda line: line.end("lambda"), 1, 3),
            to_half,
            f"{statistics.median(line.seconds for line in lines):.0f}",
            _cell(lines, lambda line: line.late_reward, 100, 1),
            _points(late),
            _plain_p_value(late and late.p_value),
        ]


def comparison_table(found: SweepLines, compared: SweepLines) -> Table:
    """Return where a sweep ended in two studies, a row for each variant, with the first's accuracy less the second's.

    By Welch's test, corrected (Holm) for the number of variants. It is not paired: on another processor the same seed
    draws other samples.
    """
    pairs = {
        variant: tuple(list(each.accuracy(variant).values()) for each in (found, compared))
        for variant in found.sweep.variants
    }
    tests = _corrected({variant: unpaired_t_test(*pair) for variant, pair in pairs.items() if all(pair)})
    rows = []
    for variant, pair in pairs.items():
        test = tests.get(variant)
        cells = [cell for reached in pair for cell in (str(len(reached)), _mean(reached, 100, 1))]
        rows.append([variant.name, *cells, _points(test), _p_value(test and test.p_value)])
    return COMPARED_HEAD, rows


def pairs_table(found: Sequence[SweepLines]) -> Table:
    """Return the pairs that sweeps ask about, with the differences over the seeds that both variants have.

    The last column is corrected (Holm) for the number of pairs that have a run: those of the sweep alone where it is a
    family of its own, else those of all the others.
    """
    alone = [[each] for each in found if each.sweep.own_family]
    together = [each for each in found if not each.sweep.own_family]
    return PAIRS_HEAD, [row for family in (together, *alone) for row in _rows_of_pairs(family)]


def _rows_of_pairs(family: Sequence[SweepLines]) -> list[list[str]]:
    asked = [
        (each.sweep.name, first.name, second.name, differences)
        for each in family
        for first, second in each.sweep.pairs
        if (differences := _differences(each.accuracy(first), each.accuracy(second)))
    ]
    flips = [sign_flip_p_value(differences) for *_, differences in asked]
    rows = []
    for (*names, differences), flipped, corrected in zip(asked, flips, holm(flips), strict=True):
        test, interval = paired_t_test(differences), confidence_interval(differences)
        shown = NONE if interval is None else " to ".join(f"{100 * end:+.1f}" for end in interval)
        p_values = [_plain_p_value(test.p_value), _plain_p_value(flipped), _p_value(corrected)]
        rows.append([*names, str(len(differences)), _points(test), shown, *p_values])
    return rows


def panels_table(found: SweepLines) -> Table:
    """Return the accuracies of a sweep over two numbers and a third field, with a row for each pair of two of them.

    The columns are over the second number: the accuracies, the differences to the first of them, seed by seed, and
    the lag's k3 at the end of the runs.
    """
    (of_series, of_axis), (of_panel,) = found.sweep.axes
    values = list(by_value(found.sweep.variants, of_axis))
    head = [of_panel, of_series, *(f"{of_axis} {value}, %" for value in values)]
    head += [f"{value} less {values[0]}, points" for value in values[1:]]
    head += [f"{value}: lag's k3, nats" for value in values[1:]]
    rows = []
    for panel, variants in by_value(found.sweep.variants, of_panel).items():
        for series, of_row in by_value(variants, of_series).items():
            reached = [found.accuracy(variant) for variant in of_row]
            tests = [_paired(later, reached[0]) for later in reached[1:]]
            lags = [
                _cell(list(found.lines[each].values()), lambda line: line.end("lag_k3"), 1, 3) for each in of_row[1:]
            ]
            accuracies = [_mean(list(each.values()), 100, 1) for each in reached]
            rows.append([panel, series, *accuracies, *map(_points, tests), *lags])
    return head, rows


def lines_of_sweeps(study: Study, lines: Sequence[Line]) -> list[SweepLines]:
    """Sort lines to the sweeps that ask for them; a line may belong to several."""
    by_cell: dict[str, dict[int, Line]] = {}
    for line in lines:
        name, seed = line.key
        by_cell.setdefault(name, {})[seed] = line
    controls = controls_of(lines)
    found = []
    for sweep in study.sweeps:
        of_variants = {}
        for variant in sweep.variants:
            runs = by_cell.get(cell_name(study.cell(sweep, variant)), {})
            of_variants[variant] = {seed: runs[seed] for seed in sweep.seeds if seed in runs}
        found.append(SweepLines(sweep, of_variants, controls))
    return found


def _differences(mine: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Differences over the seeds that both have."""
    return [mine[seed] - others[seed] for seed in sorted(mine.keys() & others.keys())]


def _paired(mine: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """The test over the seeds that both have; None where there is none."""
    differences = _differences(mine, others)
    return paired_t_test(differences) if differences else None


def _corrected(tests: Mapping[Variant, Difference]) -> dict[Variant, Difference]:
    p_values = holm([test.p_value for test in tests.values()])
    return {variant: test._replace(p_value=p) for (variant, test), p in zip(tests.items(), p_values, strict=True)}


def _plain_p_value(p_value: float | None) -> str:
    return NONE if p_value is None else f"{p_value:.2g}"


def _p_value(p_value: float | None) -> str:
    """A corrected p-value, with a star where it makes a difference."""
    return _plain_p_value(p_value) + (" *" if p_value is not None and p_value < SIGNIFICANCE else "")


def _points(test: Difference | None) -> str:
    return NONE if test is None else with_error(test.value, test.standard_error, 100, 1, "+")


def _cell(lines: Sequence[Line], value: Callable[[Line], float | None], factor: float, decimals: int) -> str:
    return _mean([found for line in lines if (found := value(line)) is not None], factor, decimals)


def _mean(values: Sequence[float], factor: float, decimals: int) -> str:
    if not values:
        return NONE
    mean = mean_over_seeds(values)
    return with_error(mean.value, mean.standard_error, factor, decimals)
