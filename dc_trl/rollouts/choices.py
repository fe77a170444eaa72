"""What the engine chose for a batch beside its tokens, and what the trainer's forward repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .truncation import Kept, Named


# Keys of a batch. TRL shuffles, splits and buffers them with the tokens, and a checkpoint within the batch has them.
_KEPT_IDS, _KEPT_COUNTS, _KEPT_LOGPS, _ROUTES = "kept_ids", "kept_counts", "kept_logps", "routed_experts"
_NAMED = ("named_ids", "named_counts", "named_logps")


class Choices(NamedTuple):
    """What the engine chose for the completions of a batch.

    Attributes:
        kept: the tokens that truncated sampling kept; None if it does not truncate, or the engine does not name them.
        routes: the experts of each token, int16, shape (B, P+T, layers, k); None if they are not replayed.
        kept_logps: the engine's log-probabilities among the kept tokens, shape (B, T), nats, where the discrepancy is
            only measured and the loss keeps those of the whole vocabulary; elsewhere None.
        named: the most probable tokens that vLLM named, for score centering; None without it.
    """

    kept: Kept | None = None
    routes: Tensor | None = None
    kept_logps: Tensor | None = None
    named: Named | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Choices:
        """Return the choices that `in_batch` added to a batch."""
        kept = Kept(batch[_KEPT_IDS], batch[_KEPT_COUNTS]) if _KEPT_IDS in batch else None
        named = Named(*(batch[key] for key in _NAMED)) if _NAMED[0] in batch else None
        return cls(kept, batch.get(_ROUTES), batch.get(_KEPT_LOGPS), named)

    def in_batch(self) -> dict[str, Tensor]:
        """Return the choices as tensors of a batch."""
        found = {_ROUTES: self.routes, _KEPT_LOGPS: self.kept_logps}
        if self.kept is not None:
            found |= {_KEPT_IDS: self.kept.ids, _KEPT_COUNTS: self.kept.counts}
        if self.named is not None:
            found |= zip(_NAMED, self.named, strict=True)
        return {name: value for name, value in found.items() if value is not None}


NO_CHOICES = Choices()
