"""Settings of `AsyncDCGRPOTrainer`."""

from dataclasses import dataclass, fields

from accelerate.logging import get_logger
from trl.experimental.async_grpo import AsyncGRPOConfig

from ..constraint.corrections import correction_of
from ..constraint.forms import coefficient_of
from ..constraint.settings import CHOICES, ConstraintSettings, read_tolerance
from ..constraint.thresholds import lag_warning
from ..rollouts.neutral_sampling import restrictions
from ..settings.contradictions import RULES_OF_THE_CONSTRAINT_ALONE, Rule, require
from ..settings.described import described
from ..settings.ranges import TRAINING, require_choice, require_number


logger = get_logger(__name__)

RULES = (
    Rule(
        lambda c: c.constraint_form.startswith("two_sided"),
        "constraint_form={c.constraint_form!r} assumes a sampler without lag, and AsyncGRPO's sampler lags: use "
        "constraint_form='log_ratio', 'quadratic' or 'injected'.",
    ),
    Rule(
        lambda c: c.deployment_scheme is not None,
        "deployment_scheme={c.deployment_scheme!r} has no effect: AsyncGRPO's server keeps the format in which it was "
        "started (vllm serve --quantization ...). Leave it out.",
    ),
    Rule(
        lambda c: c.rollout_correction.endswith("_truncate"),
        "rollout_correction={c.rollout_correction!r} bounds the ratio to the sampler, which AsyncGRPO's loss contains "
        "and clips by epsilon: use a mask ('token_mask', 'sequence_mask', 'geometric_mask', 'icepop', "
        "'tv_mask', 'ppo_clip') or 'none'.",
    ),
)


@described
@dataclass
class AsyncDCGRPOConfig(ConstraintSettings, AsyncGRPOConfig):
    r"""Configuration of [`AsyncDCGRPOTrainer`]: TRL's `AsyncGRPOConfig` with the discrepancy constraint.

    The fields of the constraint and of the correction mean the same as in [`~dc_trl.DCGRPOConfig`]. Here δ includes
    the lag of the sampler, so the default form differs. By default the constraint is `"none"`: the mismatch is only
    measured.

    Args:
        constraint_form (`str`, defaults to `"log_ratio"`):
            `"injected"`, `"quadratic"` or `"log_ratio"`, see [`~dc_trl.DCGRPOConfig`]. A signed form by
            default: the paper's makes a sampler that lags worse (docs/staleness.md).
    """

    constraint_form: str = "log_ratio"

    def __post_init__(self):
        super().__post_init__()
        for name, options in CHOICES.items():
            require_choice(name, getattr(self, name), options)
        for name in {field.name for field in fields(ConstraintSettings)} & TRAINING.keys():
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), TRAINING[name])
        coefficient_of(self)  # refuse what they name and is not there
        correction_of(self)
        self.discrepancy_tolerance = read_tolerance(self.discrepancy_tolerance)
        require(self, RULES, RULES_OF_THE_CONSTRAINT_ALONE)
        if self.compared_by is not None:
            sampling = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
            for name, value, remedy in restrictions(sampling):
                raise ValueError(
                    f"{name}={value!r} makes the engine sample from a distribution that is not the policy's, and "
                    f"{self.comparison} would take that difference for mismatch: {remedy} or "
                    f"{self.compared_by}='none'."
                )
        if warning := lag_warning(self, "the asynchronous sampler of AsyncGRPO"):
            logger.warning(warning)
