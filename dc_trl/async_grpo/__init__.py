"""DC-GRPO on TRL's experimental `AsyncGRPOTrainer`, whose sampler keeps sampling while the policy trains."""

from .config import AsyncDCGRPOConfig
from .trainer import AsyncDCGRPOTrainer


__all__ = ["AsyncDCGRPOConfig", "AsyncDCGRPOTrainer"]
