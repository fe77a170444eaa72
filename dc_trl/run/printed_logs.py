"""What a training prints of each log: TRL's metrics, and those of ours that say how the run goes.

History and trackers get all of them: transformers gives each callback the same log.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback


# Our metrics, in an evaluation too, without the five that are printed.
_LEFT_OUT = re.compile(
    r"(eval_(\w+_)?)?(discrepancy(_truncated)?|lagrangian|correction|sync|overlap|routing|time)/"
    r"(?!(mean|k3_kl|lag_k3_kl|lambda|age)$)"
)


class _Brief(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: value for name, value in (logs or {}).items() if not _LEFT_OUT.match(name)}
        super().on_log(args, state, control, logs=shown, **kwargs)


class BriefPrinter(_Brief, PrinterCallback):
    """Transformers' printed line for each log, with fewer metrics."""


class BriefProgress(_Brief, ProgressCallback):
    """Transformers' progress bar, with fewer metrics in the lines above it."""


# Transformers' callbacks, which it adds to a trainer by their classes, and what is added in their place.
BRIEF: Mapping[Any, Any] = {PrinterCallback: BriefPrinter, ProgressCallback: BriefProgress}
