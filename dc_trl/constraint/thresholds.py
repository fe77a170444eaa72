"""Thresholds of the mismatch for warnings, verdicts and advice, in nats of k3, KL(π_inf ‖ π_train).

Those of the lag are for `discrepancy/lag_k3_kl`: what the weights did since they sampled, which is 0 with a sampler in
step in every model, whatever its depth and number format. Those of a sampler in step are for the engine's part, which
a deep model has far more of than a tiny one at the same harm: scripts/study/real_model/RESULTS.md. All are findings of
docs/study.md, whose models are tiny; docs/which_one.md says what to do on either side of each.
"""

from collections.abc import Mapping

from ..version import DOCS
from .settings import PUSHES, ConstraintSettings, Part


# With a sampler in step, which differs only by its number format, no remedy helped below this (FP8, INT4, INT3).
NO_REMEDY_IN_STEP = 5e-3
# Above this, PPO's clip against a sampler in step cost accuracy (INT4).
CLIP_COSTS_IN_STEP = 1e-3
# Above this, signed forms undid the training with a sampler in step (INT3), or repaired little of a lag (INT3, NVFP4).
PULLS_HARM_IN_STEP = 3e-3
# Above this, with a sampler whose weights lag, GRPO lost 14 points in the median, and 77 in a task of long answers.
LAG_COSTS = 2e-3
# Above this, each run of GRPO, with a lag or in two bits, lost 8 points or more: the sampler is another policy.
FAR = 1e-2

_METRICS: Mapping[Part, str] = {
    "all": "discrepancy/k3_kl",
    "lag": "discrepancy/lag_k3_kl",
    "engine": "discrepancy/engine_k3_kl",
}


def reading_of_lag(k3: float) -> str:
    """Return what the lag's k3 means for plain GRPO and what to do about it, as a clause that follows the number."""
    if k3 < LAG_COSTS:
        return f"below {LAG_COSTS:g}: such a lag cost our tiny models little, so change nothing"
    remedy = f"lower weight_sync_steps, or use recipe='lag'; see {DOCS}/which_one.md"
    if k3 > FAR:
        return f"above {FAR:g}: such a lag cost our tiny models 8 points of accuracy or more, so {remedy}"
    return (
        f"above {LAG_COSTS:g}: such a lag cost our tiny models 14 points of accuracy in the median, but a deep model "
        f"in bfloat16 has that by rounding alone (the floor in `dc-trl calibrate`). If it is above its floor, {remedy}"
    )


def reading_in_step(k3: float) -> str:
    """Return what the k3 of a sampler in step means, as a clause that follows the number."""
    if k3 < NO_REMEDY_IN_STEP:
        return f"below {NO_REMEDY_IN_STEP:g}: with so little no remedy helped our tiny models, so change nothing"
    return (
        f"above {NO_REMEDY_IN_STEP:g}, which a deep model reaches by rounding alone: `dc-trl calibrate` finds the "
        "cause, and how much of it is a floor that no setting removes"
    )


def drift_warning(
    settings: ConstraintSettings, metrics: Mapping[str, float], age: int | None, clips: bool = False
) -> str | None:
    """Return a warning if the method of a run lost reward in our runs with such a mismatch; otherwise None.

    Args:
        settings: constraint and correction of the run.
        metrics: metrics of a generation batch.
        age: optimizer steps from the weights that sampled the batch to the policy's; None if that is not known.
        clips: whether the loss itself clips the ratio to the sampler, as that of AsyncGRPO does.
    """
    constrained = settings.constraint != "none"
    if constrained and ":" in settings.constraint_form:
        return None  # a function of the user's own, of which we have no runs
    form = settings.constraint_form if constrained else None
    # k3 of each part, by its metric; the engine's is that of the whole difference with a sampler in step.
    k3s = {part: (name, metrics.get(name)) for part, name in _METRICS.items()}
    if age == 0:
        k3s |= {"lag": (_METRICS["lag"], 0.0), "engine": (f"{_METRICS['all']} in step", metrics[_METRICS["all"]])}
    part: Part
    if form in PUSHES:
        setting, part, bound = "constraint_form", settings.constraint_target, FAR
        finding = "most of our runs with λ 0.1 or more ended without reward: use constraint='none'"
    elif form is not None and settings.constraint_target == "all":
        setting, part, bound = "constraint_form", "engine", PULLS_HARM_IN_STEP
        finding = (
            "it undid the training of our runs, because it pulls at the number format: set constraint_target='lag'"
        )
    elif form is None and "ppo_clip" in settings.correction_names and settings.rollout_correction_target == "all":
        setting, part, bound = "rollout_correction", "engine", CLIP_COSTS_IN_STEP
        finding = "it cost our runs accuracy, because it clips the number format: set rollout_correction_target='lag'"
    elif form is not None or clips or "ppo_clip" in settings.correction_names:
        return None  # it acts on what the weights did
    elif k3s["lag"][1] is None:
        setting, part, bound = "constraint", "all", FAR
        finding = "the number format or the lag may be the cause: discrepancy_split=True measures the lag's own part"
    else:
        setting, part, bound = "constraint", "lag", FAR
        finding = "our runs with such a lag lost 8 points or more: lower weight_sync_steps, or use recipe='lag'"
    metric, k3 = k3s[part]
    if k3 is None or k3 <= bound:
        return None
    named = f"{setting}={getattr(settings, setting)!r} with {metric}={k3:.3g}"
    return f"{named}, above {bound:g}, where {finding}. See {DOCS}/which_one.md."


def lag_warning(settings: ConstraintSettings, lag: str) -> str | None:
    """Return a warning if a form that pushes tokens down meets a sampler that lags by the setting `lag`; else None."""
    if settings.constraint == "none" or settings.constraint_form not in PUSHES:
        return None
    return (
        f"constraint_form={settings.constraint_form!r} with {lag}: our runs with such a lag and λ 0.1 ended without "
        f"reward. Use recipe='lag', or rollout_correction='ppo_clip' with constraint='none'; see {DOCS}/which_one.md."
    )
