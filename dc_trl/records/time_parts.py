"""Where the time of a run went: its parts, in the order of a step."""

from collections.abc import Mapping


EVALUATION, OTHER = "evaluation", "other"
# Part → label for readers.
PARTS = {
    "generation": "generation",
    "waiting": "waiting for rollouts",
    "sync": "weight sync",
    "reward": "reward",
    "logps": "old and reference log-probs",
    "loss": "loss, forward and backward",
    "constraint": "constraint and correction",
    "optimizer": "optimizer",
    "metrics": "metrics and logs",
    EVALUATION: "evaluation",
    "saving": "checkpoints",
    OTHER: "other, idle",
}
PREFIX = "time/"  # of the metrics, which are seconds of a part since the last log


def time_cells(seconds: Mapping[str, float], tokens: float | None) -> dict[str, tuple[str, str, str]]:
    """Return seconds, share and tokens per second of each part that took time, and of all, by their labels.

    Args:
        seconds: of each part.
        tokens: that the run has sampled and read on all processes; None where they were not counted.

    Returns:
        Label → cells. Tokens per second are all tokens divided by the seconds of the part: the speed of a run that
        does nothing else.
    """
    total = sum(seconds.values())
    spent = {label: seconds[part] for part, label in PARTS.items() if seconds.get(part)} | {"all": total}
    return {
        label: (f"{of_part:,.1f}", f"{of_part / total:.1%}", f"{tokens / of_part:,.0f}" if tokens else "–")
        for label, of_part in spent.items()
        if total
    }
