"""What a training prints of each log: TRL's metrics, and those of ours that say how the run goes.

History and trackers get all of them: transformers gives each callback the same log.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback


_OURS = ("discrepancy", "discrepancy_truncated", "lagrangian", "correction", "sync", "overlap", "routing", "time")
_SHOWN = ("mean", "k3_kl", "lag_k3_kl", "lambda", "age")


def _brief(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a log without most of our metrics, in an evaluation too."""
    return {
        name: value
        for name, value in (logs or {}).items()
        if not name.rpartition("/")[0].endswith(_OURS) or name.rpartition("/")[2] in _SHOWN
    }


class BriefPrinter(PrinterCallback):
    """Transformers' printed line for each log, with fewer metrics."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, _brief(logs), **kwargs)


class BriefProgress(ProgressCallback):
    """Transformers' progress bar, with fewer metrics in the lines above it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, _brief(logs), **kwargs)


# Transformers' callbacks, which it adds to a trainer by their classes, and what is added in their place.
BRIEF: Mapping[Any, Any] = {PrinterCallback: BriefPrinter, ProgressCallback: BriefProgress}
