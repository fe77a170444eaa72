"""Settings whose term of the loss is a mean over a micro-batch, and therefore depends on which completions share one.

A mean over the tokens of a micro-batch, and then over the micro-batches of a step, weights a token by the other tokens
of its micro-batch. All other losses are sums over the completions of the step, however these are grouped.
"""

from collections.abc import Callable
from typing import Any


# Losses that are a mean over completions; the others divide by the tokens that enter them.
MEAN_OVER_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")

MEANS_OF_MICRO_BATCHES: dict[str, Callable[[Any], bool]] = {
    "loss_type": lambda c: c.loss_type == "bnpo",
    # A quantile of the entropies of a micro-batch.
    "top_entropy_quantile": lambda c: c.top_entropy_quantile < 1.0,
    "use_adaptive_entropy": lambda c: c.use_adaptive_entropy,
    "entropy_coef": lambda c: c.entropy_coef != 0.0,
}


def mean_of_micro_batch(config: Any) -> str | None:
    """Return the first of these settings that a config has, as `name=value`; None if it has none."""
    names = (name for name, applies in MEANS_OF_MICRO_BATCHES.items() if applies(config))
    return next((f"{name}={getattr(config, name)!r}" for name in names), None)
