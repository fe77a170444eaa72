"""The settings of the constraint and of the correction, which both trainers have. This module needs no TRL."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..settings.command_line import unknown_field
from ..settings.fields import AT_LEAST_0, COUNT, UNIT, Range, require_fields, require_number, setting
from ..settings.neutral_sampling import SAMPLING_FIELDS, restrictions, truncations
from ..settings.recipes import UNCONSTRAINED, fill_in


Measure = Literal["prob_diff", "prob_ratio", "log_prob"]
# Part of log π_train − log π_inf: the whole, what the weights did since they sampled, or what the engine does.
Part = Literal["all", "lag", "engine"]
Level = Literal["token", "sequence"]
Reduction = Literal["sequence", "token"]
Constraint = Literal["none", "static", "lagrangian"]
# Fields by which a trainer acts on the difference of the engines, with the value that is off.
COMPARISONS = {"constraint": "none", "rollout_correction": "none", "score_centering": False}
# Forms that push down each sampled token that differs, whichever engine gives it the larger probability.
PUSHES = ("injected",)
# λ_0 and λ_max by form. The injected form's λ_0 is the paper's, the others are docs/study.md's; every λ_max is ours.
DEFAULT_MULTIPLIERS = {"injected": (0.1, 1.0), "quadratic": (2.0, 8.0), "log_ratio": (0.5, 2.0)}
# Of the quadratic form with a measure whose coefficient divides by a probability.
DEFAULT_OF_DIVIDED = (0.05, 1.0)
if TYPE_CHECKING:
    Tolerance = float | Literal["auto"]
else:
    # TrlParser reads a field of several types as text; `ConstraintSettings` converts it to a number.
    Tolerance = Annotated[str, "'auto' or a number"]


@dataclass
class ConstraintSettings:
    """Fields of the constraint and of the correction, of [`~dc_trl.DCGRPOConfig`] and `AsyncDCGRPOConfig`."""

    constraint: Constraint = setting(
        None,
        'How the discrepancy is constrained: "none", it is only measured; "static", with the fixed λ of lambda_init '
        '(arXiv 2606.08779, eq. 4); "lagrangian", with dual ascent (eqs. 8 to 11). If it is not set, recipe decides.',
    )
    constraint_form: str = setting(
        None,
        'How the discrepancy enters the objective. If it is not set, recipe decides. "injected": advantages minus '
        'λ·δ, the paper\'s form; "quadratic": the gradient of half the squared discrepancy (its appendix B); '
        '"log_ratio": advantages minus λ·log(π_train/π_inf); "module:function": your own, see docs/corrections.md.',
    )
    constraint_target: Literal["all", "lag"] = setting(
        None,
        'What the constraint acts on: "all", log π_train − log π_inf; "lag", log p − log p_s, by the trainer\'s own '
        "forward with the present weights and with those that sampled (see discrepancy_split). If it is not set, "
        "recipe decides.",
    )
    discrepancy_split: bool = setting(
        False,
        "Measure the lag's and the engine's part of the discrepancy separately (discrepancy/lag_* and engine_*). A "
        "batch whose weights lag costs one more forward without a gradient, with the weights that sampled it, and the "
        "host keeps a copy of these.",
    )
    discrepancy_measure: Measure = setting(
        "prob_diff",
        'Discrepancy δ of a token (eq. 2): "prob_diff" is |π_train − π_inf|, "prob_ratio" is |π_train/π_inf − 1|, '
        'and "log_prob" is |log π_train − log π_inf|.',
    )
    discrepancy_level: Level = setting(
        "token", 'With "token" every token is penalised by its own δ, with "sequence" by the mean δ of its trajectory.'
    )
    discrepancy_tolerance: Tolerance = setting(
        None,
        "Tolerance ε of δ̄, above which λ grows. If it is not set: the paper's 0.0037 if λ does not move and the "
        'measure is "prob_diff", otherwise "auto": λ rests for ten generation batches, and ε is then the mean of '
        "their δ̄ plus 2.37 standard deviations, which one healthy batch in forty exceeds.",
    )
    discrepancy_margin: Annotated[float, AT_LEAST_0] = setting(0.0, "Tokens with a δ up to this are not penalised.")
    batch_reduction: Reduction = setting(
        "sequence",
        'How the batch discrepancy δ̄ (eq. 11) is averaged: "sequence" is the mean over trajectories of their token '
        'means, "token" is the mean over all tokens.',
    )
    dual_window: Annotated[int, COUNT] = setting(1, "Generation batches over which δ̄ is averaged before it moves λ.")
    lambda_init: Annotated[float, AT_LEAST_0] = setting(
        None,
        "Initial λ, between lambda_min and lambda_max. If it is not set: 0.1 (arXiv 2606.08779, 8B) for the injected "
        "form, 0.5 for the log ratio, 2 for the quadratic form, or 0.05 where it divides by a probability.",
    )
    lambda_lr: Annotated[float, AT_LEAST_0] = setting(1.0, "Step size η_λ of the dual ascent (arXiv 2606.08779).")
    lambda_min: Annotated[float, AT_LEAST_0] = setting(0.0, "Lower bound of λ.")
    lambda_max: Annotated[float, AT_LEAST_0] = setting(
        None, "Upper bound of λ. If it is not set: 2 for log_ratio, 8 for quadratic with prob_diff, otherwise 1."
    )
    rollout_correction: str = setting(
        "none",
        'How the advantage of a token is weighted by r = π_train/π_inf. "token_truncate" (TIS) clips r, "token_mask" '
        '(MIS) is 0 outside the bounds; "sequence_truncate", "sequence_mask", "geometric_mask" weigh trajectories. '
        '"icepop", "tv_mask" (DPPO), "ppo_clip": see docs/corrections.md. In a list the first one '
        "gives the weight: [token_truncate, geometric_mask(0.99, 1.01)]. Masked tokens do not count in δ̄.",
    )
    rollout_correction_max: Annotated[float | None, Range(above=0, infinite=True)] = setting(
        None,
        "Upper bound of the correction; infinity means no bound. If it is not set: 2 (arXiv 2602.01826), for "
        '"geometric_mask" 1.01 (SkyRL), for "icepop" 5 (verl), for PPO\'s clip 1.24. For "tv_mask" it is a '
        "difference of probabilities, by default 0.2 (SkyRL).",
    )
    rollout_correction_min: Annotated[float | None, UNIT] = setting(
        None,
        'Lower bound of the correction. If it is not set: 0, for "geometric_mask" 0.99, for "icepop" 0.5, for PPO\'s '
        'clips 0.76. "tv_mask" has none.',
    )
    rollout_correction_target: Part = setting(
        "all",
        'Which ratio the correction uses: "all" is r = π_train/π_inf, "lag" is p/p_s, and "engine" is p_s/π_inf; see '
        "constraint_target.",
    )
    deployment_scheme: str | None = setting(
        None,
        'Number format that the policy is deployed and therefore sampled in: "bf16", "fp8", "fp8_w8a16", "fp8_block", '
        '"int8", "int4", "int4_g32", "nvfp4", "nvfp4a16" or "mxfp8"; by an in-process replica, or with use_vllm by '
        'vLLM in this format. If "+fp8_kv" is appended ("fp8+fp8_kv"), the KV cache is in FP8 too. For research the '
        'replica also has "int3" and "int2", which no engine serves.',
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> "ConstraintSettings":
        """Refuse a misspelt field with the nearest name; Python would only say that it is unexpected."""
        known = [field.name for field in fields(cls) if field.init]
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_field(name, known))
        return super().__new__(cls)

    acts = False  # whether a trainer is being built that heeds these fields

    @property
    def place_model_on_device(self) -> None:
        """What every trainer of transformers reads when it is built; None, its default.

        Raises:
            TypeError: the trainer heeds none of these fields, and one of them asks for something.
        """
        asked = "deployment_scheme" if self.deployment_scheme is not None else self.compared_by
        if asked is not None and not self.acts:
            ours = type(self).__name__.replace("Config", "Trainer")
            raise TypeError(
                f"{asked}={getattr(self, asked)!r} of a {type(self).__name__} acts in {ours} alone, and another "
                f"trainer was given it as args: use {ours}, or TRL's own configuration."
            )

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Give fields other values in the block."""
        own = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(own)

    @property
    def correction_names(self) -> tuple[str, ...]:
        """Names of the corrections that `rollout_correction` combines; empty for "none"."""
        parts = [] if self.rollout_correction == "none" else parts_of(self.rollout_correction)
        return tuple(name for name, _ in parts)

    def __post_init__(self) -> None:
        """Fill in what is left open (None) and read what a parser hands over as text; refuse what no field takes."""
        fill_in(self, UNCONSTRAINED)
        if isinstance(self.rollout_correction, list | tuple):
            self.rollout_correction = ", ".join(map(str, self.rollout_correction))
        require_fields(self, of=ConstraintSettings)
        init, maximum = DEFAULT_MULTIPLIERS.get(self.constraint_form, DEFAULT_MULTIPLIERS["injected"])
        if self.constraint_form == "quadratic" and self.discrepancy_measure != "prob_diff":
            init, maximum = DEFAULT_OF_DIVIDED
        asleep = self.constraint != "lagrangian"  # ε moves no λ
        tolerance = 0.0037 if asleep and self.discrepancy_measure == "prob_diff" else "auto"
        fill_in(self, {"discrepancy_tolerance": tolerance, "lambda_init": init, "lambda_max": maximum})
        if self.discrepancy_tolerance != "auto":
            if isinstance(self.discrepancy_tolerance, str):
                with suppress(ValueError):
                    self.discrepancy_tolerance = float(self.discrepancy_tolerance)
            require_number("discrepancy_tolerance", self.discrepancy_tolerance, AT_LEAST_0)

    @property
    def compared_by(self) -> str | None:
        """The field that makes the trainer act on the difference of the engines; None where nothing does.

        It needs the rollouts' log-probabilities, from an engine that samples from the policy's distribution.
        """
        return next((name for name, off in COMPARISONS.items() if vars(self).get(name, off) != off), None)

    @property
    def split_by(self) -> str | None:
        """The setting that splits the discrepancy into lag and engine, as `name=value`; None where none does."""
        corrects = self.rollout_correction != "none"
        asks = {
            "constraint_target": self.constraint != "none" and self.constraint_target != "all",
            "rollout_correction_target": corrects and self.rollout_correction_target != "all",
            "discrepancy_split": self.discrepancy_split,
        }
        return next((f"{name}={getattr(self, name)!r}" for name in asks if asks[name]), None)

    @property
    def comparison(self) -> str:
        """`compared_by` with its value, for messages."""
        return f"{self.compared_by}={getattr(self, str(self.compared_by))!r}"

    @property
    def without_comparison(self) -> str:
        """`compared_by` with the value that switches it off, for messages."""
        return f"{self.compared_by}={COMPARISONS[str(self.compared_by)]!r}"

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of generation that a sampling engine gets, by name."""
        own = {name: value for name, value in vars(self).items() if name in SAMPLING_FIELDS}
        return own | (vars(self).get("generation_kwargs") or {})

    @property
    def truncations(self) -> dict[str, Any]:
        """Those of top-p, top-k and min-p that cut off what is sampled, with their values."""
        return truncations(self.sampling)

    def require_policys_distribution(
        self, sampling: Mapping[str, Any], corrected: Collection[str] = (), place: str = ""
    ) -> dict[str, Any]:
        """Refuse settings of generation with which engines that are compared do not sample from the policy.

        Args:
            sampling: settings by name.
            corrected: names of truncations that are corrected for.
            place: where the settings stand, if they are no fields.

        Returns:
            These settings, where nothing acts on the difference: the measured discrepancy contains what they do.
        """
        found = {}
        for name, value, remedy in restrictions(sampling, corrected, vars(self).get("temperature")):
            found[name] = value
            if self.compared_by is None:
                continue
            raise ValueError(
                f"{name}={value!r}{place and f' of {place}'} makes the engine sample from a distribution that is not "
                f"the policy's, or report another's, and {self.comparison} would take that difference for mismatch: "
                f"{remedy}{place and f' in {place}'} or {self.without_comparison}."
            )
        return found


_BOUND = r"\s*([\d.]+|inf)\s*"
_PART = re.compile(rf"\s*([\w.:]+)\s*(?:\({_BOUND}(?:,{_BOUND})?\))?\s*")


def parts_of(correction: str) -> list[tuple[str, dict[str, float]]]:
    """Return name and bounds of each correction that a value of `rollout_correction` combines, in their order.

    Raises:
        ValueError: it is not a list of names, each with at most two bounds.
    """
    parts = []
    for part in re.split(r",(?![^(]*\))", correction):  # at commas outside of parentheses
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(
                f"rollout_correction={correction!r} is invalid: use a name, or several with commas, each with at "
                "most two bounds in parentheses: 'token_truncate, geometric_mask(0.99, 1.01)'."
            )
        name, *bounds = (text for text in found.groups() if text is not None)
        parts.append((name, dict(zip(("lower", "upper")[2 - len(bounds) :], map(float, bounds), strict=True))))
    return parts
