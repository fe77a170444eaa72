"""When new weights go to the engine that samples. In between it samples with older ones: its weights lag."""

from dataclasses import dataclass
from typing import Any


@dataclass
class SyncSchedule:
    """Which weights sample in training, named by the number of optimizer steps that made them.

    Args:
        every: optimizer steps after which newer weights are due, at least 1.
        step: whose weights sample; None before the first sync.
        wanted: whether newer ones are due at the next generation batch, whatever `every` says.
        syncs: how often training got newer weights.
        steps: at how many optimizer steps it has sampled: with `every=1` it would have got newer weights at each.
    """

    every: int
    step: int | None = None
    wanted: bool = False
    syncs: int = 0
    steps: int = 0
    _sampled_at: int | None = None

    def due(self, step: int) -> bool:
        """Whether training at an optimizer step is to sample with newer weights. Once it is, it is until the sync."""
        return self.step is None or self.wanted or step - self.step >= self.every

    def lags(self, step: int) -> bool:
        """Whether training at an optimizer step is to sample with older weights than those of this step."""
        return step != self.step and not self.due(step)

    def synced(self, step: int) -> None:
        """The weights of an optimizer step sample from now on."""
        self.syncs += step != self.step
        self.step, self.wanted = step, False

    def sampled(self, step: int) -> int:
        """A generation batch was sampled at an optimizer step; returns the age of its weights in such steps."""
        assert self.step is not None
        self.steps += step != self._sampled_at
        self._sampled_at = step
        return step - self.step

    def state_dict(self) -> dict[str, Any]:
        """All but `every`, as JSON values."""
        return {name: value for name, value in vars(self).items() if name != "every"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict()`."""
        vars(self).update(state)
