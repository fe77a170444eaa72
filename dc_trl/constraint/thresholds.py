"""Thresholds of the mismatch for warnings, verdicts and advice, in nats of k3, KL(π_inf ‖ π_train).

Those of the lag are for `discrepancy/lag_k3_kl`: what the weights did since they sampled, which is 0 with a sampler in
step in every model, whatever its depth and number format. Those of a sampler in step are for the engine's part, which
a deep model has far more of than a tiny one at the same harm: docs/real_model.md. All are findings of docs/study.md,
whose models are tiny; docs/which_one.md says what to do on either side of each.
"""

from collections.abc import Mapping

from .settings import PUSHES, ConstraintSettings


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


def reading_of_lag(k3: float) -> str:
    """Return what the lag's k3 means for plain GRPO and what to do about it, as a clause that follows the number."""
    if k3 < LAG_COSTS:
        return f"below {LAG_COSTS:g}: such a lag cost our tiny models little, so change nothing"
    far = k3 > FAR
    cost = "8 points of accuracy or more" if far else "14 points of accuracy in the median"
    return (
        f"above {FAR if far else LAG_COSTS:g}: such a lag cost our tiny models {cost}, so lower weight_sync_steps, or "
        "use recipe='lag'; see docs/staleness.md"
    )


def reading_in_step(k3: float) -> str:
    """Return what the k3 of a sampler in step means, as a clause that follows the number."""
    if k3 < NO_REMEDY_IN_STEP:
        return f"below {NO_REMEDY_IN_STEP:g}, up to which no remedy helped our tiny models: none is needed"
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
    clip = "ppo_clip" in settings.correction_names
    target = settings.constraint_target if constrained else settings.rollout_correction_target
    whole, engine = metrics["discrepancy/k3_kl"], metrics.get("discrepancy/engine_k3_kl")
    lag = metrics.get("discrepancy/lag_k3_kl")
    if age == 0:
        lag, engine = 0.0, whole

    def warning(name: str, what: str, k3: float | None, bound: float, finding: str) -> str | None:
        if k3 is None or not k3 > bound:
            return None
        named = f"{name}={getattr(settings, name)!r} with {what}={k3:.3g}, above {bound:g}"
        return f"{named}, where {finding}. See docs/which_one.md."

    name = "constraint" if form is None else "constraint_form"
    if form in PUSHES:
        return warning(
            name,
            "discrepancy/k3_kl" if target == "all" else "discrepancy/lag_k3_kl",
            whole if target == "all" else lag,
            FAR,
            "most of our runs with λ 0.1 or more ended without reward: use constraint='none'",
        )
    if form is not None or clip:
        if target != "all":
            return None  # what it acts on is the lag's part alone, or not its own number format
        setting = name if form is not None else "rollout_correction"
        bound = CLIP_COSTS_IN_STEP if form is None else PULLS_HARM_IN_STEP
        finding = "it acted on the number format and cost our runs accuracy: set "
        remedy = "constraint_target='lag'" if form is not None else "rollout_correction_target='lag'"
        return warning(setting, "the engine's part of k3", engine, bound, finding + remedy)
    if clips:
        return None
    if lag is None:
        finding = "number format or lag may be the cause: discrepancy_split=True measures the lag's own part"
        return warning(name, "discrepancy/k3_kl", whole, FAR, finding)
    finding = "our runs with such a lag lost 8 points or more: lower weight_sync_steps, or use recipe='lag'"
    return warning(name, "discrepancy/lag_k3_kl", lag, FAR, finding)


def lag_warning(settings: ConstraintSettings, lag: str) -> str | None:
    """Return a warning if a form that pushes tokens down meets a sampler that lags by the setting `lag`; else None."""
    if settings.constraint == "none" or settings.constraint_form not in PUSHES:
        return None
    return (
        f"constraint_form={settings.constraint_form!r} with {lag}: our runs with such a lag and λ 0.1 ended without "
        "reward. Use recipe='lag', or rollout_correction='ppo_clip' with constraint='none'; see docs/staleness.md."
    )
