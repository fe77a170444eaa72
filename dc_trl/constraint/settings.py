"""The settings of the constraint and of the correction, which both trainers have. This module needs no TRL."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..settings.command_line import unknown_field
from ..settings.fields import setting
from ..settings.ranges import AT_LEAST_0, COUNT, Range, require_number


Measure = Literal["prob_diff", "prob_ratio", "log_prob"]
Level = Literal["token", "sequence"]
Reduction = Literal["sequence", "token"]
Constraint = Literal["none", "static", "lagrangian"]
# Forms that push down each sampled token that differs, whichever engine gives it the larger probability.
PUSHES = ("injected",)
if TYPE_CHECKING:
    Tolerance = float | Literal["auto"]
else:
    # TrlParser reads a field of several types as text; `DCGRPOConfig` converts it to a number.
    Tolerance = str


@dataclass
class ConstraintSettings:
    """Fields of the constraint and of the correction, of [`~dc_trl.DCGRPOConfig`] and `AsyncDCGRPOConfig`."""

    constraint: Constraint = setting(
        "none",
        'How the discrepancy is constrained. If it is not set, recipe decides. "none": GRPO; the discrepancy is only '
        'measured and logged. "static": Dual-GRPO (arXiv 2606.08779, eq. 4), advantages minus λ·δ with the fixed λ of '
        'lambda_init. "lagrangian": DC-GRPO (eqs. 8 to 11), dual ascent moves λ after each generation batch.',
    )
    constraint_form: str = setting(
        "injected",
        "How the discrepancy enters the objective (dc_trl.constraint.forms). "
        '"injected": the paper\'s form, advantages minus λ·δ. "quadratic": the gradient of half the squared '
        'discrepancy (the paper\'s appendix B). "log_ratio": advantages minus λ·log(π_train/π_inf), which is the '
        "gradient of half the expected square of that logarithm over the engine's tokens, and nearly that of a KL "
        'divergence. "two_sided_kl" and "two_sided_l1": a term of the loss between the policy and its quantized '
        "self, with gradients through both; they need deployment_scheme and take one more forward and backward pass. "
        '"module:function": a function of your own, see docs/own_form.md.',
    )
    discrepancy_measure: Measure = setting(
        "prob_diff",
        'Discrepancy δ of a token (eq. 2): "prob_diff" is |π_train − π_inf|, "prob_ratio" is |π_train/π_inf − 1|, and '
        '"log_prob" is |log π_train − log π_inf|.',
    )
    discrepancy_level: Level = setting(
        "token",
        'With "token" every token is penalised by its own δ, with "sequence" by the mean δ of its trajectory.',
    )
    discrepancy_tolerance: Tolerance = setting(
        0.0037,
        "Tolerance ε in units of the measure, at least 0: λ grows while the batch discrepancy δ̄ is above it and "
        'shrinks while δ̄ is below. With "auto", λ rests for the first ten generation batches; ε is then the mean of '
        "their δ̄ plus 2.37 standard deviations, which one healthy batch in forty exceeds "
        "(dc_trl.constraint.tolerance.proposed_tolerance), and is logged as lagrangian/tolerance.",
    )
    discrepancy_margin: Annotated[float, AT_LEAST_0] = setting(
        0.0, "Tokens whose δ is at or below this margin are not penalised."
    )
    batch_reduction: Reduction = setting(
        "sequence",
        'How the batch discrepancy δ̄ (eq. 11) is averaged: "sequence" is the mean over trajectories of their token '
        'means, "token" is the mean over all tokens.',
    )
    dual_window: Annotated[int, COUNT] = setting(
        1, "Number of generation batches that δ̄ is averaged over before it moves λ."
    )
    lambda_init: Annotated[float, AT_LEAST_0] = setting(0.1, "Initial λ, between lambda_min and lambda_max.")
    lambda_lr: Annotated[float, AT_LEAST_0] = setting(1.0, "Step size η_λ of the dual ascent.")
    lambda_min: Annotated[float, AT_LEAST_0] = setting(0.0, "Lower bound of λ.")
    lambda_max: Annotated[float, AT_LEAST_0] = setting(
        1.0, "Upper bound of λ. The paper does not state one; the default is ours."
    )
    rollout_correction: str = setting(
        "none",
        "How the advantage of a token is weighted by r = π_train/π_inf, with any engine and any constraint. "
        '"token_truncate" (TIS) clips r to the bounds. "token_mask" (MIS) takes r, and 0 outside the bounds. '
        '"sequence_truncate" and "sequence_mask" do the same with the product of a trajectory\'s r. '
        '"geometric_mask" masks trajectories whose geometric mean of r is outside the bounds. "icepop" is '
        '"token_mask" with two bounds. "tv_mask" (DPPO) takes r, and 0 where π_train − π_inf has passed the bound in '
        'the direction of the advantage. "ppo_clip" is PPO\'s clip with the sampler as the old policy. "none" weights '
        "nothing. Masked tokens do not count in δ̄. See dc_trl.constraint.corrections for the papers.",
    )
    rollout_correction_max: Annotated[float | None, Range(above=0, infinite=True)] = setting(
        None,
        "Upper bound of the correction, at least 1; infinity means no bound. If it is not set: 2 (arXiv 2602.01826), "
        'for "geometric_mask" 1.01 (SkyRL), for "icepop" 5 (verl), for "ppo_clip" 1.24. For "tv_mask" it is a '
        "difference of probabilities below 1, and 0.2 (SkyRL) if it is not set.",
    )
    rollout_correction_min: Annotated[float | None, Range(least=0, most=1)] = setting(
        None,
        'Lower bound of the correction, at most 1. If it is not set: 0, for "geometric_mask" 0.99, for "icepop" 0.5, '
        'for "ppo_clip" 0.76. "tv_mask" has no lower bound.',
    )
    deployment_scheme: str | None = setting(
        None,
        "Number format that the policy is deployed in, and therefore sampled in: "
        '"bf16", "fp8", "fp8_block", "int8", "int4" or "int4_g32". With use_vllm=false an in-process replica of the '
        "policy samples, with use_vllm=true a vLLM engine that runs in this format. For research on a large mismatch "
        'the replica also has "int3" and "int2", which no engine serves.',
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> "ConstraintSettings":
        """Refuse a misspelt field with the nearest name; Python would only say that it is unexpected."""
        known = [field.name for field in fields(cls) if field.init]
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_field(name, known))
        return super().__new__(cls)

    @property
    def compared_by(self) -> str | None:
        """The field that makes the trainer act on the difference of the engines; None where nothing does.

        Such a setting needs the rollouts' log-probabilities, and an engine that samples from the policy's
        distribution.
        """
        return next((name for name in ("constraint", "rollout_correction") if getattr(self, name) != "none"), None)

    @property
    def comparison(self) -> str:
        """`compared_by` with its value, for messages; empty where it is None."""
        return "" if self.compared_by is None else f"{self.compared_by}={getattr(self, self.compared_by)!r}"


def read_tolerance(value: Any) -> float | Literal["auto"]:
    """Return what `discrepancy_tolerance` means: a parser hands over a number as text.

    Raises:
        ValueError: it is neither a finite number that is at least 0 nor "auto".
    """
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(
                f"discrepancy_tolerance={value!r} is invalid: use a finite number that is at least 0, or 'auto'."
            ) from None
    require_number("discrepancy_tolerance", value, AT_LEAST_0)
    return value
