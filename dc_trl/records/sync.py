"""The cost of bringing weights to the engine of a run, for readers."""

from collections.abc import Mapping


_STAGES = ("gather", "quantize", "write", "reload")


def sync_facts(cost: Mapping[str, float]) -> dict[str, str]:
    """Return the mean bytes and seconds of one synchronization, for a summary.

    Args:
        cost: sums over a run, as `summary.json` has them under `weight_sync`: `count`, `bytes_written`,
            `bytes_reused`, and the seconds of each stage. Empty where no checkpoint was written.
    """
    if not cost:
        return {}
    count = cost["count"]
    written, reused = (f"{cost[name] / count / 1e6:,.1f}" for name in ("bytes_written", "bytes_reused"))
    seconds = " + ".join(f"{cost[f'{stage}_seconds'] / count:.3f}" for stage in _STAGES)
    return {
        "weight syncs through a checkpoint": f"{count:,.0f}",
        "MB of each, written + kept from before": f"{written} + {reused}",
        f"seconds of each: {', '.join(_STAGES)}": seconds,
    }
