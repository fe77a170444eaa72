"""Schedule of the weight synchronizations to the engine that samples, whose weights lag in between."""

from dataclasses import dataclass
from typing import Any


@dataclass
class SyncSchedule:
    """Keeps which weights sample in training, as the number of optimizer steps that made them.

    Args:
        every: number of optimizer steps after which newer weights are due, at least 1.
        step: optimizer steps of the weights that sample; None before the first sync.
        wanted: whether newer weights are due at the next generation batch, regardless of `every`.
        syncs: number of times that newer weights were sent.
        steps: number of optimizer steps at which a batch was sampled; with `every=1`, each of them would have had new
            weights.
    """

    every: int
    step: int | None = None
    wanted: bool = False
    syncs: int = 0
    steps: int = 0
    _sampled_at: int | None = None

    def due(self, step: int) -> bool:
        """Return whether newer weights are due at an optimizer step; they stay due until the sync."""
        return self.step is None or self.wanted or step - self.step >= self.every

    def lags(self, step: int) -> bool:
        """Return whether a batch at an optimizer step is sampled with older weights than those of this step."""
        return step != self.step and not self.due(step)

    def synced(self, step: int) -> None:
        """Record that the weights of an optimizer step sample from now on."""
        self.syncs += step != self.step
        self.step, self.wanted = step, False

    def sampled(self, step: int) -> int:
        """Record a generation batch at an optimizer step, and return the age of its weights in optimizer steps."""
        assert self.step is not None
        self.steps += step != self._sampled_at
        self._sampled_at = step
        return step - self.step

    def state_dict(self) -> dict[str, Any]:
        """Return all fields but `every`, as JSON-compatible values."""
        return {name: value for name, value in vars(self).items() if name != "every"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        vars(self).update(state)
