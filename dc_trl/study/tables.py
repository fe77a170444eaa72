"""The tables of a study: where each variant of a sweep ends, and its differences to the sweep's reference and to GRPO
in step."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..ablation.plan import Sweep, Variant
from ..ablation.results import mean_over_seeds
from ..records.tables import SIGNIFICANCE, TableRows, with_error
from .controls import PRIMARY, Controls, control_of, controls_of, is_control
from .lines import Line
from .plan import Study, cell_name
from .significance import PairedTest, UnpairedTest, holm, paired_t_test, unpaired_t_test


@dataclass(frozen=True)
class Comparison:
    """A variant against the reference of its sweep, paired by seed.

    `p_value` is corrected (Holm) for the number of comparisons of the sweep; None where there is none.
    """

    variant: Variant
    test: PairedTest
    p_value: float | None

    @property
    def differs(self) -> bool:
        """Whether the study calls it a difference."""
        return _differs(self.p_value)


@dataclass(frozen=True)
class SweepLines:
    """The lines of a sweep, by variant and seed, and the study's controls; variants without a line have none."""

    sweep: Sweep
    lines: Mapping[Variant, Mapping[int, Line]]
    controls: Controls

    def accuracy(self, variant: Variant) -> dict[int, float]:
        """Greedy accuracy of the deployed policy by seed, 0 to 1: the mean over a run's last evaluations."""
        found = {seed: line.last(PRIMARY) for seed, line in self.lines[variant].items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def comparisons(self) -> list[Comparison]:
        """Every other variant against the reference, over the seeds that both have."""
        of_reference = self.accuracy(self.sweep.reference)
        tests: list[tuple[Variant, PairedTest]] = []
        for variant in self.sweep.variants:
            test = _paired(self.accuracy(variant), of_reference)
            if variant != self.sweep.reference and test is not None:
                tests.append((variant, test))
        corrected = holm([test.p_value for _, test in tests])
        return [Comparison(variant, test, p) for (variant, test), p in zip(tests, corrected, strict=True)]

    def against_control(self, variant: Variant) -> PairedTest | None:
        """A variant against GRPO in step in its setting, over the seeds that both have; None where there is none.

        It was not registered, and its p-value is not corrected for the number of comparisons.
        """
        lines = list(self.lines[variant].values())
        if not lines or is_control(lines[0]):
            return None
        return _paired(self.accuracy(variant), control_of(lines[0], self.controls))

    def table(self) -> TableRows:
        """A row for each variant: accuracies, the differences to reference and control, and how the run went."""
        head = [
            *("variant", "seeds", "greedy, %", "last one, %", "sampled, %", "trained, %"),
            *("difference, points", "p", "to GRPO in step", "δ̄, 10⁻³", "k3, 10⁻³", "entropy", "λ"),
            *("steps to 50 %", "seconds"),
        ]
        compared = {comparison.variant: comparison for comparison in self.comparisons()}
        return head, [self._row(variant, compared.get(variant)) for variant in self.sweep.variants]

    def _row(self, variant: Variant, compared: Comparison | None) -> list[str]:
        lines = list(self.lines[variant].values())
        if not lines:
            return [variant.name, "0", *["–"] * 13]
        halves = [line.steps_to_half for line in lines if line.steps_to_half is not None]
        to_half = f"{statistics.median(halves):.0f}" if len(halves) == len(lines) else f"{len(halves)} of {len(lines)}"
        return [
            variant.name,
            str(len(lines)),
            _cell(lines, lambda line: line.last(PRIMARY), 100, 1),
            _cell(lines, lambda line: line.last(PRIMARY, 1), 100, 1),
            _cell(lines, lambda line: line.last("sampled"), 100, 1),
            _cell(lines, lambda line: line.last("trained_greedy"), 100, 1),
            _points(compared.test if compared is not None else None),
            _p_value(compared.p_value if compared is not None else None),
            _points(self.against_control(variant)),
            _cell(lines, lambda line: line.end("discrepancy"), 1e3, 2),
            _cell(lines, lambda line: line.end("k3"), 1e3, 2),
            _cell(lines, lambda line: line.end("entropy"), 1, 3),
            _cell(lines, lambda line: line.end("lambda"), 1, 3),
            to_half,
            f"{statistics.median(line.seconds for line in lines):.0f}",
        ]


def _paired(mine: Mapping[int, float], others: Mapping[int, float]) -> PairedTest | None:
    """The test over the seeds that both have; None where there is none."""
    differences = [mine[seed] - others[seed] for seed in sorted(mine.keys() & others.keys())]
    return paired_t_test(differences) if differences else None


def _differs(corrected: float | None) -> bool:
    return corrected is not None and corrected < SIGNIFICANCE


def _p_value(corrected: float | None) -> str:
    """A corrected p-value, with a star where it makes a difference."""
    return "–" if corrected is None else f"{corrected:.2g}{' *' if _differs(corrected) else ''}"


def _points(test: PairedTest | UnpairedTest | None) -> str:
    return "–" if test is None else with_error(test.difference, test.standard_error, 100, 1, "+")


def _cell(lines: Sequence[Line], value: Callable[[Line], float | None], factor: float, decimals: int) -> str:
    return _mean([found for line in lines if (found := value(line)) is not None], factor, decimals)


def _mean(values: Sequence[float], factor: float, decimals: int) -> str:
    if not values:
        return "–"
    mean = mean_over_seeds(values)
    return with_error(mean.value, mean.standard_error, factor, decimals)


def comparison_table(found: SweepLines, compared: SweepLines) -> TableRows:
    """Where a sweep ended in two studies, a row for each variant: accuracies, and the first's less the second's.

    By Welch's test, corrected (Holm) for the number of variants. It is not paired: on another processor the same seed
    draws other samples.
    """
    head = ["variant", "seeds", "greedy, %", "seeds, compared", "greedy, %, compared", "difference, points", "p"]
    pairs = {
        variant: tuple(list(each.accuracy(variant).values()) for each in (found, compared))
        for variant in found.sweep.variants
    }
    tests = {variant: unpaired_t_test(*pair) for variant, pair in pairs.items() if all(pair)}
    corrected = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    rows = []
    for variant, pair in pairs.items():
        cells = [cell for reached in pair for cell in (str(len(reached)), _mean(reached, 100, 1))]
        rows.append([variant.name, *cells, _points(tests.get(variant)), _p_value(corrected.get(variant))])
    return head, rows


def lines_of_sweeps(study: Study, lines: Sequence[Line]) -> list[SweepLines]:
    """Sorts lines to the sweeps that ask for them; a line may belong to several."""
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
