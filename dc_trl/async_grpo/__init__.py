"""DC-GRPO on TRL's experimental `AsyncGRPOTrainer`, whose sampler goes on while it trains."""

from .config import AsyncDCGRPOConfig
from .trainer import AsyncDCGRPOTrainer


__all__ = ["AsyncDCGRPOConfig", "AsyncDCGRPOTrainer"]
