"""DC-GRPO on TRL's experimental `AsyncGRPOTrainer`, whose sampler keeps sampling while the policy trains."""

from .async_config import AsyncDCGRPOConfig
from .async_trainer import AsyncDCGRPOTrainer


__all__ = ["AsyncDCGRPOConfig", "AsyncDCGRPOTrainer"]
