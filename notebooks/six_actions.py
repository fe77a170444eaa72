"""The example of geometry.ipynb and geometry.md: what each measure makes of one state with six actions.

python notebooks/six_actions.py     prints the table, and draws build/geometry/toy_two_sided.png and toy_one_sided.png
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from geometry import budgeted_policy
from matplotlib.figure import Figure
from simplex import Measure, Vector

from dc_trl.records.figures import ACCENT, INK, MUTED, new_figure
from dc_trl.records.tables import markdown_table


ACTIONS = ("high +", "high −", "medium +", "medium −", "low +", "low −")
INFER_PROBS = np.array([0.36, 0.34, 0.14, 0.12, 0.025, 0.015])
# The rarer a good action, the better it is: what the tail is sought for.
ADVANTAGES = np.array([0.4, -0.6, 0.7, -0.8, 1.0, -1.0])
BUDGET = 0.7  # of Σ D², the same for all three measures
TAIL = INFER_PROBS < 0.05
MEASURES: dict[Measure, str] = {
    "prob_diff": "probability difference",
    "log_prob": "log-probability",
    "prob_ratio": "probability ratio",
}
COLOURS = {"prob_diff": ACCENT, "log_prob": "#e0a458", "prob_ratio": INK}
DROPPED = 1e-6  # below this an action counts as dropped


@dataclass
class Outcome:
    """A policy under a budget, shape (6,), its multiplier β, and what the table says of it."""

    policy: Vector
    beta: float

    @property
    def support(self) -> int:
        """The number of actions that are left."""
        return int((self.policy > DROPPED).sum())

    @property
    def entropy(self) -> float:
        """The policy's entropy, nats."""
        kept = self.policy[self.policy > 0]
        return float(-(kept * np.log(kept)).sum())

    @property
    def tail(self) -> float:
        """The mass of the two rare actions."""
        return float(self.policy[TAIL].sum())

    def cells(self) -> list[str]:
        """Return probabilities, support, entropy, tail and expected advantage as cells of the table."""
        probabilities = [f"{value:.4f}" if value > DROPPED else "0" for value in self.policy]
        advantage = f"{self.policy @ ADVANTAGES:+.3f}"
        return [*probabilities, str(self.support), f"{self.entropy:.3f}", f"{self.tail:.4f}", advantage]


def outcomes(one_sided: bool, budget: float = BUDGET) -> dict[Measure, Outcome]:
    """Return what each measure makes of the six actions, when all three may spend the same Σ D²."""
    return {
        measure: Outcome(*budgeted_policy(INFER_PROBS, ADVANTAGES, budget, measure, one_sided)) for measure in MEASURES
    }


def table() -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table: advantages, the sampling engine, and the outcome of each measure."""
    rows = [
        ["advantage", "", *(f"{value:+.1f}" for value in ADVANTAGES), *[""] * 4],
        ["π_inf", "", *Outcome(INFER_PROBS, math.nan).cells()],
    ]
    for side, one_sided in (("two-sided", False), ("one-sided", True)):
        for measure, outcome in outcomes(one_sided).items():
            rows.append([f"`{measure}`, {side}", f"{outcome.beta:.3f}", *outcome.cells()])
    return ["", "β", *ACTIONS, "support", "entropy", "tail", "E[A]"], rows


def draw(one_sided: bool) -> Figure:
    """Draw the six probabilities under the sampling engine and under each measure."""
    figure, (axes,) = new_figure(width=7.2, height=4.4)
    series = {"π_inf": INFER_PROBS} | {name: found.policy for name, found in outcomes(one_sided).items()}
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
    axes.set_title(f"Optimal policy under Σ D² ≤ {BUDGET:g}, {side}", fontsize=12, color=INK, loc="left")
    axes.plot([], [], "x", color=MUTED, markersize=6, markeredgewidth=1.8, label="dropped (probability 0)")
    axes.legend(frameon=False, fontsize=10)
    axes.grid(visible=False, axis="x")
    return figure


def main() -> None:
    output = Path("build", "geometry")
    output.mkdir(parents=True, exist_ok=True)
    print(markdown_table(*table()))
    for name, one_sided in (("two_sided", False), ("one_sided", True)):
        draw(one_sided).savefig(output / f"toy_{name}.png")
    print(f"drew {output}/toy_two_sided.png and toy_one_sided.png")


if __name__ == "__main__":
    main()
