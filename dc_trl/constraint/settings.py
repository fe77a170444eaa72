"""The settings of the constraint and of the correction, which both trainers have. This module needs no TRL."""

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..settings.command_line import unknown_field
from ..settings.fields import setting
from ..settings.ranges import AT_LEAST_0, COUNT, Range, require_number


Measure = Literal["prob_diff", "prob_ratio", "log_prob", "squared_log_ratio"]
# Part of the difference between the engines that a remedy acts on.
Target = Literal["all", "lag"]
DualAscent = Literal["paper", "auto", "pid"]
Level = Literal["token", "sequence"]
Reduction = Literal["sequence", "token"]
Constraint = Literal["none", "static", "lagrangian"]
# Forms that push down each sampled token that differs, whichever engine gives it the larger probability.
PUSHES = ("injected",)
# λ_0 and λ_max by form. λ_0 of the injected form is the paper's, the others are those of docs/study.md; all λ_max are
# ours.
DEFAULT_MULTIPLIERS = {
    "injected": (0.1, 1.0),
    "quadratic": (2.0, 8.0),
    "log_ratio": (0.5, 2.0),
}
# Of the quadratic form with a measure whose coefficient divides by a probability.
DEFAULT_OF_DIVIDED = (0.05, 1.0)
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
        "How the discrepancy enters the objective (dc_trl.constraint.forms). If it is not set, recipe decides. "
        '"injected": the paper\'s form, advantages minus λ·δ. "quadratic": the gradient of half the squared '
        'discrepancy (the paper\'s appendix B). "log_ratio": advantages minus λ·log(π_train/π_inf), which is the '
        "gradient of half the expected square of that logarithm over the engine's tokens, and nearly that of a KL "
        'divergence. "module:function": a function of your own, see docs/own_form.md.',
    )
    constraint_target: Target = setting(
        "all",
        'Which part of the difference between the engines the constraint acts on, and moves λ by. "all": '
        'log π_train − log π_inf. "lag": log π_Q − log π_inf, where π_Q are the same weights through the deployed '
        "forward: the lag of the sampler and the kernels, without the number format; see discrepancy_split.",
    )
    discrepancy_split: bool = setting(
        False,
        "Measure the two parts of the difference between the engines on their own, as discrepancy/format_* and "
        "discrepancy/lag_*. This takes one more forward without a gradient, through the deployed forward of "
        "deployment_scheme; with train_through_quantization the format's part is 0 and costs nothing. "
        'constraint_target="lag" and rollout_correction_target="lag" split too.',
    )
    discrepancy_measure: Measure = setting(
        "prob_diff",
        'Discrepancy δ of a token (eq. 2): "prob_diff" is |π_train − π_inf|, "prob_ratio" is |π_train/π_inf − 1|, '
        '"log_prob" is |log π_train − log π_inf|, and "squared_log_ratio" is ½ (log π_train − log π_inf)², whose '
        'gradient by sampled tokens is that of constraint_form="log_ratio": λ then prices what the loss descends.',
    )
    discrepancy_level: Level = setting(
        "token",
        'With "token" every token is penalised by its own δ, with "sequence" by the mean δ of its trajectory.',
    )
    discrepancy_tolerance: Tolerance = setting(
        None,
        "Tolerance ε in units of the measure, at least 0: λ grows while the batch discrepancy δ̄ is above it and "
        'shrinks while δ̄ is below. If it is not set: "auto" where λ moves, because δ̄ differs a hundredfold between '
        "models; elsewhere, for the difference of probabilities, the paper's 0.0037 (arXiv 2606.08779, 8B). With "
        '"auto", λ rests for the first ten generation batches; ε is then the mean of their δ̄ plus 2.37 standard '
        "deviations, which one healthy batch in forty exceeds (dc_trl.constraint.tolerance.proposed_tolerance), and "
        "is logged as lagrangian/tolerance.",
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
    dual: DualAscent = setting(
        "paper",
        'How constraint="lagrangian" moves λ. "paper" adds η_λ (δ̄ − ε) (arXiv 2606.08779, eq. 11). "auto" adds '
        "η_λ (δ̄/ε − 1), at most η_λ: the relative violation, which has no unit, so one η_λ suits every measure. "
        '"pid" sums the same violations, and adds lambda_kp times the present one and lambda_kd times its rise (PID '
        "Lagrangian, arXiv 2007.03964).",
    )
    lambda_init: Annotated[float, AT_LEAST_0] = setting(
        None,
        "Initial λ, between lambda_min and lambda_max. If it is not set: 0.1 (arXiv 2606.08779, 8B) for the injected "
        "form, and what docs/study.md found best for the others: 0.5 for the log ratio, 2 for "
        "the quadratic form, or 0.05 where it divides by a probability.",
    )
    lambda_lr: Annotated[float, AT_LEAST_0] = setting(
        None,
        'Step size η_λ of the dual ascent. If it is not set: 1 with dual="paper" (arXiv 2606.08779), otherwise a '
        "tenth of the form's own lambda_init.",
    )
    lambda_min: Annotated[float, AT_LEAST_0] = setting(0.0, "Lower bound of λ.")
    lambda_max: Annotated[float, AT_LEAST_0] = setting(
        None,
        "Upper bound of λ. The paper does not state one. If it is not set: 1 for the injected form and where the "
        "quadratic form divides by a probability, otherwise four times the form's own lambda_init.",
    )
    lambda_kp: Annotated[float, AT_LEAST_0] = setting(
        None, "Weight of the present violation in a PID multiplier. If it is not set: lambda_lr."
    )
    lambda_kd: Annotated[float, AT_LEAST_0] = setting(
        None, "Weight of a rise of the violation in a PID multiplier. If it is not set: lambda_lr."
    )
    rollout_correction: str = setting(
        "none",
        "How the advantage of a token is weighted by r = π_train/π_inf, with any engine and any constraint. "
        '"token_truncate" (TIS) clips r to the bounds. "token_mask" (MIS) takes r, and 0 outside the bounds. '
        '"sequence_truncate" and "sequence_mask" do the same with the product of a trajectory\'s r. '
        '"geometric_mask" masks trajectories whose geometric mean of r is outside the bounds. "icepop" is '
        '"token_mask" with two bounds. "tv_mask" (DPPO) takes r, and 0 where π_train − π_inf has passed the bound in '
        'the direction of the advantage. "ppo_clip" is PPO\'s clip with the sampler as the old policy, '
        'and "ppo_clip_by_age" is the same with bounds that are nearer to 1 for older rollouts. '
        '"odds_truncate" clips r where the ratio of odds passes a bound. "none" weights nothing. Several in a list, '
        "or behind commas, combine: the first one weighs, and the others mask, with their bounds in parentheses: "
        "[token_truncate, geometric_mask(0.99, 1.01)]. Masked tokens do not count in δ̄. See "
        "dc_trl.constraint.corrections for the papers.",
    )
    rollout_correction_max: Annotated[float | None, Range(above=0, infinite=True)] = setting(
        None,
        "Upper bound of the correction, at least 1; infinity means no bound. If it is not set: 2 (arXiv 2602.01826), "
        'for "geometric_mask" 1.01 (SkyRL), for "icepop" 5 (verl), for PPO\'s clips 1.24. For "tv_mask" it is a '
        "difference of probabilities below 1, and 0.2 (SkyRL) if it is not set.",
    )
    rollout_correction_min: Annotated[float | None, Range(least=0, most=1)] = setting(
        None,
        'Lower bound of the correction, at most 1. If it is not set: 0, for "geometric_mask" 0.99, for "icepop" 0.5, '
        'for PPO\'s clips 0.76. "tv_mask" has no lower bound.',
    )
    rollout_correction_target: Target = setting(
        "all",
        'Which ratio the correction takes: "all" is r = π_train/π_inf, "lag" is π_Q/π_inf, see constraint_target.',
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
    def correction_names(self) -> tuple[str, ...]:
        """Names of the corrections that `rollout_correction` combines; empty for "none"."""
        parts = [] if self.rollout_correction == "none" else parts_of(self.rollout_correction)
        return tuple(name for name, _ in parts)

    def fill_in_multiplier(self) -> None:
        """Give the fields of λ that are left open (None) the defaults of their form, measure and dual ascent."""
        init, maximum = DEFAULT_MULTIPLIERS.get(self.constraint_form, DEFAULT_MULTIPLIERS["injected"])
        if self.constraint_form == "quadratic" and self.discrepancy_measure != "prob_diff":
            init, maximum = DEFAULT_OF_DIVIDED
        rate = 1.0 if self.dual == "paper" else init / 10
        asleep = self.constraint != "lagrangian"  # ε moves no λ
        defaults: dict[str, Any] = {
            "discrepancy_tolerance": 0.0037 if asleep and self.discrepancy_measure == "prob_diff" else "auto",
            "lambda_init": init,
            "lambda_max": maximum,
            "lambda_lr": rate,
        }
        if self.dual == "pid":
            defaults |= dict.fromkeys(("lambda_kp", "lambda_kd"), rate if self.lambda_lr is None else self.lambda_lr)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def compared_by(self) -> str | None:
        """The field that makes the trainer act on the difference of the engines; None where nothing does.

        Such a setting needs the rollouts' log-probabilities, and an engine that samples from the policy's
        distribution.
        """
        return next((name for name, off in self._comparisons.items() if getattr(self, name) != off), None)

    @property
    def _comparisons(self) -> dict[str, Any]:
        """The fields by which the trainer acts on the difference of the engines, and the value that is off."""
        return {"constraint": "none", "rollout_correction": "none"}

    @property
    def split_by(self) -> str | None:
        """The field that makes the trainer split the discrepancy into format and lag; None where nothing does."""
        if self.constraint != "none" and self.constraint_target == "lag":
            return "constraint_target"
        if self.rollout_correction != "none" and self.rollout_correction_target == "lag":
            return "rollout_correction_target"
        return "discrepancy_split" if self.discrepancy_split else None

    @property
    def split_setting(self) -> str | None:
        """`split_by` with its value, for messages; None where nothing splits."""
        return None if self.split_by is None else f"{self.split_by}={getattr(self, self.split_by)!r}"

    @property
    def comparison(self) -> str:
        """`compared_by` with its value, for messages; empty where it is None."""
        return "" if self.compared_by is None else f"{self.compared_by}={getattr(self, self.compared_by)!r}"

    @property
    def without_comparison(self) -> str:
        """`compared_by` with the value that switches it off, for messages; empty where it is None."""
        return "" if self.compared_by is None else f"{self.compared_by}={self._comparisons[self.compared_by]!r}"


_PART = re.compile(r"\s*([\w.:]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")


def parts_of(correction: str) -> list[tuple[str, dict[str, float]]]:
    """Return name and bounds of each correction that a value of `rollout_correction` combines, in their order.

    Raises:
        ValueError: it is not a list of names, each with at most two bounds, which engines that agree are within.
    """
    parts, end = [], 0
    while end < len(correction):
        found = _PART.match(correction, end)
        try:
            numbers = [float(number) for number in (found[2] or "").split(",") if number] if found else []
        except ValueError:
            found = None
        if found is None or len(numbers) > 2:
            raise ValueError(
                f"rollout_correction={correction!r} is invalid: use a name, or several behind commas, each with at "
                "most two bounds in parentheses: 'token_truncate, geometric_mask(0.99, 1.01)'."
            )
        name, bounds = found[1], dict(zip(("lower", "upper")[2 - len(numbers) :], numbers, strict=True))
        agree = 0.0 if name == "tv_mask" else 1.0  # the difference, or the ratio, of engines that agree
        if not bounds.get("lower", 0.0) <= agree <= bounds.get("upper", 1.0):
            raise ValueError(
                f"rollout_correction={correction!r}: the bounds of {name} shut out engines that agree: include "
                f"{agree:g}."
            )
        parts.append((name, bounds))
        end = found.end()
    return parts


def read_correction(value: Any) -> Any:
    """Return `rollout_correction` as text: a list of corrections becomes their names behind commas."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


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
