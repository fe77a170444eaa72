"""Settings of `AsyncDCGRPOTrainer`."""

from dataclasses import dataclass

from accelerate.logging import get_logger
from trl.experimental.async_grpo import AsyncGRPOConfig

from ..constraint.corrections import correction_of
from ..constraint.forms import coefficient_of
from ..constraint.settings import ConstraintSettings
from ..constraint.thresholds import lag_warning
from ..settings.contradictions import Rule, refuse, require_consistent
from ..settings.fields import setting
from ..settings.neutral_sampling import restriction_warning


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
        "makes a sampler that lags worse (docs/which_one.md).",
    )

    def __post_init__(self):
        AsyncGRPOConfig.__post_init__(self)
        ConstraintSettings.__post_init__(self)
        coefficient_of(self)  # refuses a form, and correction_of a correction, that does not exist
        correction_of(self)
        refuse(self, RULES, "contradicts AsyncGRPO")
        require_consistent(self)
        self.restrictions = self.require_policys_distribution(self.sampling)
        if self.restrictions:
            logger.warning(restriction_warning(self.restrictions, "AsyncGRPO knows none, so leave them out"))
        if warning := lag_warning(self, "the asynchronous sampler of AsyncGRPO"):
            logger.warning(warning)
