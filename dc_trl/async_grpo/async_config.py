"""Settings of `AsyncDCGRPOTrainer`."""

from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from trl.experimental.async_grpo import AsyncGRPOConfig

from ..constraint.corrections import correction_of
from ..constraint.forms import coefficient_of
from ..constraint.settings import ConstraintSettings, read_correction, read_tolerance
from ..constraint.thresholds import lag_warning
from ..settings.contradictions import CONTRADICTIONS, Rule, refuse, require_effect
from ..settings.fields import require_fields, setting
from ..settings.neutral_sampling import TRUNCATIONS, restrictions, truncation_warning, truncations


logger = get_logger(__name__)

RULES = (
    Rule(
        "deployment_scheme",
        {},
        "its server keeps the format in which it was started (vllm serve --quantization ...); leave it out",
    ),
    Rule(
        "rollout_correction",
        {},
        "its loss contains the ratio to the sampler and clips it by epsilon; use a mask ('token_mask', "
        "'sequence_mask', 'geometric_mask', 'icepop', 'tv_mask', 'ppo_clip') or 'none'",
        lambda c: any(name.endswith("_truncate") for name in c.correction_names),
    ),
)


@dataclass
class AsyncDCGRPOConfig(ConstraintSettings, AsyncGRPOConfig):
    r"""Configuration of [`AsyncDCGRPOTrainer`]: TRL's `AsyncGRPOConfig` with the discrepancy constraint.

    The fields of the constraint and of the correction mean the same as in [`~dc_trl.DCGRPOConfig`]. Here δ includes
    the lag of the sampler, so the default form differs. By default (`constraint="none"`) it is only measured.
    """

    constraint_form: str = setting(
        "log_ratio",
        '"injected", "quadratic" or "log_ratio", as in DCGRPOConfig. The default is a signed form: the paper\'s form '
        "makes a sampler that lags worse (docs/staleness.md).",
    )

    def __post_init__(self):
        super().__post_init__()
        self.rollout_correction = read_correction(self.rollout_correction)
        require_fields(self, of=ConstraintSettings)
        self.fill_in_multiplier()
        coefficient_of(self)  # refuses a form, and correction_of a correction, that does not exist
        correction_of(self)
        self.discrepancy_tolerance = read_tolerance(self.discrepancy_tolerance)
        refuse(self, RULES, "contradicts AsyncGRPO")
        require_effect(self)
        refuse(self, CONTRADICTIONS)
        if self.compared_by is not None:
            for name, value, remedy in restrictions(self._sampling):
                raise ValueError(self.other_distribution(f"{name}={value!r}", remedy))
        elif self.truncations:
            logger.warning(truncation_warning(self._sampling, "AsyncGRPO knows none, so sample without truncation"))
        if warning := lag_warning(self, "the asynchronous sampler of AsyncGRPO"):
            logger.warning(warning)

    @property
    def truncations(self) -> dict[str, Any]:
        """Those of top-p, top-k and min-p that cut off what is sampled, with their values."""
        return truncations(self._sampling)

    @property
    def _sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*TRUNCATIONS, "repetition_penalty")}
