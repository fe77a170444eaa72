"""Thresholds of the mismatch for warnings, verdicts and advice, in nats of `discrepancy/k3_kl`.

All are findings of docs/study.md, whose models are tiny. docs/which_one.md says what to do on either side of each.
A deeper model has a larger k3 with a sampler in step: SmolLM2-135M in FP8 0.04 to 0.1, where a tiny model has
0.0004. What a lag or a run adds is therefore counted from the run's own level in step.
"""

import statistics
from collections.abc import Mapping, Sequence

from .settings import PUSHES, ConstraintSettings


# With a sampler in step, which differs only by its number format, no remedy helped below this (FP8, INT4, INT3).
NO_REMEDY_IN_STEP = 5e-3
# Above this, PPO's clip against a sampler in step cost accuracy (INT4).
CLIP_COSTS_IN_STEP = 1e-3
# Above this, signed forms undid the training with a sampler in step (INT3). With a sampler whose weights lag, they and
# PPO's clip then repaired little (INT3, NVFP4) or harmed (SmolLM2-135M in FP8).
PULLS_HARM_IN_STEP = 3e-3
# Above this, with a sampler whose weights lag, GRPO lost 14 points in the median, and 77 in a task of long answers.
LAG_COSTS = 2e-3
# Above this, each run of GRPO, with a lag or in two bits, lost 8 points or more: the sampler is another policy.
FAR = 1e-2

# Generation batches with a sampler in step whose k3 make the level.
LEVEL_BATCHES = 10
# k3 of single batches in step differ by this factor (SmolLM2-135M in FP8, 2,048 tokens: 0.024 to 0.054).
_NOISE = 2.0


def level_in_step(values: Sequence[float]) -> float:
    """Return a run's own level of k3, in nats, from its first generation batches whose weights had the age 0.

    Args:
        values: k3 of these batches, nats, the first ones first; without any the level counts as 0.
    """
    return statistics.median(values[:LEVEL_BATCHES]) if values else 0.0


def reading(k3: float, may_lag: bool, level: float = 0.0) -> str:
    """Return what a k3 means for plain GRPO and what to do about it, as a clause that follows the number.

    Args:
        k3: KL(π_inf ‖ π_train) by the k3 estimator, nats.
        may_lag: whether the sampler may have older weights than the policy.
        level: the run's own level with a sampler in step, nats; see `level_in_step`.
    """
    usual = _NOISE * level
    if may_lag:
        above = f"above twice the run's own level without a lag ({level:.2g})"
        if k3 < LAG_COSTS + usual:
            return f"less than {LAG_COSTS:g} {above}: such a lag cost our tiny models little, so change nothing"
        far = k3 > FAR + usual
        cost = "8 points of accuracy or more" if far else "14 points of accuracy in the median"
        return (
            f"more than {FAR if far else LAG_COSTS:g} {above}: such a lag cost our tiny models {cost}, so lower "
            "weight_sync_steps, or see docs/staleness.md"
        )
    if k3 < NO_REMEDY_IN_STEP:
        return f"below {NO_REMEDY_IN_STEP:g}, up to which no remedy helped our tiny models: none is needed"
    if k3 > usual > 0:
        return f"{k3 / level:.2g} times its level of {level:.2g} at the beginning: look at reward and answers' length"
    return f"above {NO_REMEDY_IN_STEP:g}, which our tiny models reached in INT2: `dc-trl calibrate` finds the cause"


def drift_warning(
    settings: ConstraintSettings, metrics: Mapping[str, float], may_lag: bool, clips: bool = False, level: float = 0.0
) -> str | None:
    """Return a warning if the method of a run lost reward in our runs with such a mismatch; otherwise None.

    Args:
        settings: constraint and correction of the run.
        metrics: metrics of a generation batch, with the k3 of the part of the mismatch that the remedy acts on, nats.
        may_lag: whether the settings let the sampler have older weights than the policy.
        clips: whether the loss itself clips the ratio to the sampler, as that of AsyncGRPO does.
        level: the run's own level of that k3 with a sampler in step, nats; see `level_in_step`. What harms by the
            number format alone, with a sampler in step, is not counted from it.
    """
    constrained = settings.constraint != "none"
    if constrained and ":" in settings.constraint_form:
        return None  # a function of the user's own, of which we have no runs
    form = settings.constraint_form if constrained else None
    pulls = form is not None or clips or "ppo_clip" in settings.correction_names
    named = "constraint='none'"
    if pulls:
        setting = "rollout_correction" if form is None else "constraint_form"
        named = f"{setting}={getattr(settings, setting)!r}"
    measured = k3_of(settings)
    k3, far = metrics[measured], FAR + _NOISE * level
    if form in PUSHES:
        finding = "most of our runs with λ 0.1 or more ended without reward: use constraint='none'"
    elif pulls and may_lag:  # it repaired the runs with a lag, unless it also pulled at their number format
        k3, far, measured = level, PULLS_HARM_IN_STEP, f"{measured} in step"
        finding = "it helped our runs with a lag little, or harmed: lower weight_sync_steps"
    elif pulls and form is None:
        far, finding = CLIP_COSTS_IN_STEP, "it cost runs without a lag 4 points: use train_through_quantization"
    elif pulls:
        far, finding = PULLS_HARM_IN_STEP, "our runs without a lag lost most accuracy: use train_through_quantization"
    elif may_lag:
        finding = "our runs with such a lag lost 8 points or more: lower weight_sync_steps"
        finding += ", or use recipe='lag'" if level <= PULLS_HARM_IN_STEP else ""
    else:
        return None  # plain GRPO in step needed no remedy
    warning = f"{named} with {measured}={k3:.3g}, above {far:.2g}, where {finding}. See docs/which_one.md."
    return warning if k3 > far else None


def k3_of(settings: ConstraintSettings) -> str:
    """Return the name of the k3 of the part of the mismatch that the remedy of a run acts on."""
    return "discrepancy/k3_kl" if settings.split_by in (None, "discrepancy_split") else "discrepancy/lag_k3_kl"


def lag_warning(settings: ConstraintSettings, lag: str) -> str | None:
    """Return a warning if a form that pushes tokens down meets a sampler that lags by the setting `lag`; else None."""
    if settings.constraint == "none" or settings.constraint_form not in PUSHES:
        return None
    return (
        f"constraint_form={settings.constraint_form!r} with {lag}: our runs with such a lag and λ 0.1 ended without "
        "reward. Use recipe='lag', or rollout_correction='ppo_clip' with constraint='none'; see docs/staleness.md."
    )
