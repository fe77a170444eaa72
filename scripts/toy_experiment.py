"""What each of the three penalties makes of one state with six actions: a table, and a figure for each side.

python scripts/toy_experiment.py --output runs/toy
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dc_trl.files import make_folder
from dc_trl.report.figures import ACCENT, INK, MUTED, new_figure
from dc_trl.settings.command_line import OptionParser, refused_in_one_line
from dc_trl.settings.ranges import ABOVE_0, require_number
from dc_trl.theory import budgeted_policy, squared_discrepancy
from dc_trl.theory.simplex import Measure, Vector


ACTIONS = ("high +", "high −", "medium +", "medium −", "low +", "low −")
INFER_PROBS = np.array([0.36, 0.34, 0.14, 0.12, 0.025, 0.015])
# The rarer a good action, the better it is: what the tail is sought for.
ADVANTAGES = np.array([0.4, -0.6, 0.7, -0.8, 1.0, -1.0])
BUDGET = 0.7
TAIL = INFER_PROBS < 0.05
MEASURES: dict[Measure, str] = {
    "prob_diff": "probability difference",
    "log_prob": "log-probability",
    "prob_ratio": "probability ratio",
}
COLOURS = {"prob_diff": ACCENT, "log_prob": "#e0a458", "prob_ratio": INK}
# Below this an action counts as dropped.
DROPPED = 1e-6


@dataclass
class Outcome:
    """A policy under a budget, and what the table says of it."""

    policy: Vector
    beta: float
    spent: float

    @property
    def support(self) -> int:
        return int((self.policy > DROPPED).sum())

    @property
    def entropy(self) -> float:
        kept = self.policy[self.policy > 0]
        return float(-(kept * np.log(kept)).sum())

    @property
    def tail(self) -> float:
        return float(self.policy[TAIL].sum())

    @property
    def advantage(self) -> float:
        return float(self.policy @ ADVANTAGES)


def outcomes(one_sided: bool, budget: float = BUDGET) -> dict[str, Outcome]:
    """What each measure makes of the six actions, when all three may spend the same Σ D²."""
    found = {}
    for measure in MEASURES:
        policy, beta = budgeted_policy(INFER_PROBS, ADVANTAGES, budget, measure, one_sided)
        spent = squared_discrepancy(policy, INFER_PROBS, measure, one_sided)
        if beta == 0:
            raise ValueError(f"budget={budget!r} is slack for {measure!r}: choose a smaller one, so that it binds.")
        found[measure] = Outcome(policy, beta, spent)
    return found


def table(budget: float) -> Table:
    result = Table("", "β", *ACTIONS, "support", "entropy", "tail", "E[A]", title_justify="left")
    result.title = f"Six actions, Σ D² = {budget:g}"
    start = Outcome(INFER_PROBS, math.nan, 0.0)
    result.add_row("advantage", "", *(f"{value:+.1f}" for value in ADVANTAGES))
    result.add_row("π_inf", "", *row(start))
    for side, one_sided in (("two-sided", False), ("one-sided", True)):
        result.add_section()
        for measure, outcome in outcomes(one_sided, budget).items():
            result.add_row(f"{measure}, {side}", f"{outcome.beta:.3g}", *row(outcome))
    return result


def row(outcome: Outcome) -> list[str]:
    probabilities = [f"{value:.4f}" if value > DROPPED else "0" for value in outcome.policy]
    support, entropy = str(outcome.support), f"{outcome.entropy:.3f}"
    return [*probabilities, support, entropy, f"{outcome.tail:.4f}", f"{outcome.advantage:+.3f}"]


def draw(one_sided: bool, budget: float, path: Path) -> None:
    """The six probabilities under π_inf and each measure as a PNG."""
    figure, (axes,) = new_figure(width=7.2, height=4.4)
    series = {"π_inf": INFER_PROBS} | {name: found.policy for name, found in outcomes(one_sided, budget).items()}
    width = 0.2
    for index, (name, policy) in enumerate(series.items()):
        places = np.arange(len(ACTIONS)) + (index - 1.5) * width
        colour = COLOURS.get(name, MUTED)
        axes.bar(places, policy, width * 0.92, color=colour, label=MEASURES.get(name, "sampling engine π_inf"))
        for place, value in zip(places, policy, strict=True):
            if value <= DROPPED:  # a bar of height 0 says that an action was dropped only if one can see it
                axes.plot(place, 0.006, marker="x", color=colour, markersize=6, markeredgewidth=1.8)
    labels = [f"{name[:-1].strip()}\nA = {value:+.1f}" for name, value in zip(ACTIONS, ADVANTAGES, strict=True)]
    axes.set_xticks(range(len(ACTIONS)), labels, fontsize=10)
    axes.set_ylabel("probability", fontsize=11)
    axes.set_ylim(bottom=0)
    side = "one-sided: only π > π_inf is priced" if one_sided else "two-sided"
    axes.set_title(f"Optimal policy under Σ D² ≤ {budget:g}, {side}", fontsize=12, color=INK, loc="left")
    axes.plot([], [], "x", color=MUTED, markersize=6, markeredgewidth=1.8, label="dropped (probability 0)")
    axes.legend(frameon=False, fontsize=10)
    axes.grid(visible=False, axis="x")
    figure.savefig(path)


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a new directory for the two figures")
    parser.add_argument("--budget", type=float, default=BUDGET, help="of Σ D², the same for all three measures")
    args = parser.parse_args()
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        sys.exit(f"error: output={str(args.output)!r} already exists: choose another directory, or remove it first.")
    with refused_in_one_line():
        require_number("budget", args.budget, ABOVE_0)
        result = table(args.budget)
        make_folder("output", args.output)
    console = Console()
    console.print(result) if console.is_terminal else Console(width=160).print(result)
    for name, one_sided in (("two_sided", False), ("one_sided", True)):
        draw(one_sided, args.budget, args.output / f"toy_{name}.png")
        console.print(f"wrote {args.output / f'toy_{name}.png'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
