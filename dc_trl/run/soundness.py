"""No optimizer step with a gradient that is not finite, and no checkpoint of weights that are not."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..quantization.policy import not_finite
from .manifest import way_back


# Optimizer steps in a row that may be left out. A loss scale, which begins at 2^16, is halved in each: 2^-16 is left.
_PATIENCE, _PATIENCE_WITH_SCALE = 5, 32

logger = get_logger(__name__)


class DivergedError(ArithmeticError):
    """Gradients or weights are not finite, so that nothing more can be learned; the message says how to go on."""


class Soundness:
    """Keeps a trainer's weights finite, in every process alike.

    Args:
        trainer: trainer of transformers.

    Attributes:
        may_save (`bool`): whether the gradient of the last step was finite; that of a loss scale which is searched
            need not be.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.may_save = True
        self._left_out = 0  # optimizer steps in a row

    def checked(self, norm: Tensor | float | None, model: Any) -> Tensor | float | None:
        """Return the gradient norm of a step, and remove the gradients if it is not finite.

        The optimizer passes over parameters that have no gradient: weights, moments and decay stay as they are.

        Raises:
            DivergedError: it has not been finite for several steps in a row.
        """
        searched = self._trainer.accelerator.scaler is not None
        # The norm of shards is a part of it in each process. DeepSpeed has stepped already, and may have no norm.
        whole = 0.0 if norm is None else float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = math.isfinite(whole)
        self._left_out = 0 if finite else self._left_out + 1
        self.may_save = finite or searched
        if not finite:
            model.zero_grad()
            step = self._trainer.state.global_step + 1
            found = f"grad_norm={whole:g} at step {step}"
            if self._left_out == (_PATIENCE_WITH_SCALE if searched else _PATIENCE):
                raise self._diverged(f"{found}, and not finite for {self._left_out} steps")
            if not searched:
                logger.warning(f"{found}: the optimizer leaves this step out, and nothing is saved at it.")
        return norm

    def require_finite(self) -> None:
        """Raise a `DivergedError` unless the weights that are trained are finite in every process."""
        trainer = self._trainer
        trained = ((name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad)
        flag = torch.tensor([not_finite(trained) is not None], device=trainer.accelerator.device)
        if trainer.accelerator.gather(flag).any():
            raise self._diverged(f"The weights are not finite after step {trainer.state.global_step}, and not saved")

    def _diverged(self, what: str) -> DivergedError:
        args = self._trainer.args
        remedy = f"lower learning_rate={args.learning_rate:g} to a third, or look at the last batches"
        return DivergedError(f"{what}: {remedy}. {way_back(args.output_dir, self._trainer.state.global_step)}")
