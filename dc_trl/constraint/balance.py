"""λ in balance: the constraint pulls on the weights with a chosen share of the reward's force."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def gradient_norm(output: Tensor, parameters: Iterable[Tensor], weights: Tensor | None = None) -> float:
    """Euclidean norm of the gradient of Σ weights · output; the graph stays, and no `grad` is touched.

    Args:
        output: with a gradient, any shape.
        parameters: with respect to which the gradient is taken; those that `output` does not depend on count as 0.
        weights: shape of `output`; None for a scalar.
    """
    gradients = torch.autograd.grad(output, list(parameters), weights, retain_graph=True, allow_unused=True)
    norms = [gradient.float().norm() for gradient in gradients if gradient is not None]
    return torch.stack(norms).norm().item() if norms else 0.0


class BalancedMultiplier:
    """Multiplier λ at which the constraint's gradient has a chosen share of the reward's norm.

    After iteration k, with g_r the gradient of the reward's loss and g_c that of the constraint at λ = 1, and E the
    exponential moving average over iterations:  λ_{k+1} = Π_[λ_min, λ_max]( share · √(E‖g_r‖² / E‖g_c‖²) ).

    The rule is ours. Adaptive weights of a KL term that follow gradient norms are GradNorm's idea (arXiv 1711.02257).

    Args:
        init: λ_0, within [minimum, maximum].
        share: of the reward's gradient norm, above 0.
        decay: of the moving average, in [0, 1): about 1 / (1 − decay) iterations count.
        minimum, maximum: bounds of λ, 0 ≤ minimum ≤ maximum.
        tolerance: ε, which this λ does not follow; for who compares δ̄ with it. None where there is none.
    """

    def __init__(
        self,
        init: float = 0.1,
        share: float = 0.3,
        decay: float = 0.9,
        minimum: float = 0.0,
        maximum: float = 1.0,
        tolerance: float | None = None,
    ):
        self.tolerance = tolerance
        self.share = share
        self.decay = decay
        self.minimum = minimum
        self.maximum = maximum
        self._value = float(init)
        self._squares = (0.0, 0.0)  # moving averages of ‖g_r‖² and ‖g_c‖², both from 0: their ratio has no bias

    @property
    def value(self) -> float:
        """Current λ."""
        return self._value

    def update(self, reward_norm: float, constraint_norm: float) -> float:
        """Takes in the norms ‖g_r‖ and ‖g_c‖ of an iteration; returns the new λ.

        λ stays where the constraint has never had a gradient: no multiplier would give it one.

        Raises:
            ValueError: a norm is negative or not finite.
        """
        norms = {"reward_norm": reward_norm, "constraint_norm": constraint_norm}
        for name, norm in norms.items():
            if not math.isfinite(norm) or norm < 0:
                raise ValueError(f"{name}={norm!r} is no norm: pass a finite number that is at least 0.")
        reward, constraint = (
            self.decay * mean + (1 - self.decay) * norm**2
            for mean, norm in zip(self._squares, norms.values(), strict=True)
        )
        self._squares = (reward, constraint)
        if constraint > 0:
            self._value = min(max(self.share * math.sqrt(reward / constraint), self.minimum), self.maximum)
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """λ and the moving averages, as JSON-compatible values. The settings belong to the constructor."""
        return {"value": self._value, "squares": list(self._squares)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from ``state_dict()``; λ is projected onto the present bounds."""
        self._value = min(max(float(state_dict["value"]), self.minimum), self.maximum)
        reward, constraint = state_dict["squares"]
        self._squares = (float(reward), float(constraint))
