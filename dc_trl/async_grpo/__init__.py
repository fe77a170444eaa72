"""DC-GRPO on TRL's experimental `AsyncGRPOTrainer`, whose sampler keeps sampling while the policy trains.

It stands beside `trainer`, and nothing else imports it.
"""

from .async_config import AsyncDCGRPOConfig
from .async_trainer import AsyncDCGRPOTrainer


__all__ = ["AsyncDCGRPOConfig", "AsyncDCGRPOTrainer"]
