"""From which mismatch on something is said or done: one constant for each threshold, in nats of `discrepancy/k3_kl`.

All are findings of docs/study.md, whose models are tiny. docs/which_one.md says what to do on either side of them, and
the warnings of a run, its verdict and the advice of a calibration read them from here.
"""

# A sampler in step, in which only the number format differs: up to here no remedy was seen to help (FP8, INT4, INT3).
NO_REMEDY_IN_STEP = 5e-3
# From here on PPO's clip against such a sampler cost accuracy (INT4).
CLIP_COSTS_IN_STEP = 1e-3
# From here on signed forms undid the training there (INT3).
PULLS_HARM_IN_STEP = 3e-3
# A sampler whose weights lag: from here on GRPO lost 8 to 10 points on the mean.
LAG_COSTS = 2e-3
# Here the sampler is another policy: each run of GRPO beyond it, with a lag or in two bits, lost 8 points or more.
FAR = 1e-2


def reading(k3: float, may_lag: bool) -> str:
    """What a k3 means for plain GRPO, and what to do about it: a clause that goes on after the number.

    Args:
        k3: KL(π_inf ‖ π_train) by the k3 estimator, nats.
        may_lag: whether the sampler may have older weights than the policy.
    """
    if may_lag:
        if k3 < LAG_COSTS:
            return f"below {LAG_COSTS:g}, up to which a lag cost our tiny models little: no remedy is needed"
        cost = "8 points of accuracy or more" if k3 > FAR else "10 points of accuracy on the mean"
        return (
            f"above {FAR if k3 > FAR else LAG_COSTS:g}, where a lag cost our tiny models {cost}: lower "
            "weight_sync_steps, or see docs/staleness.md"
        )
    if k3 < NO_REMEDY_IN_STEP:
        return f"below {NO_REMEDY_IN_STEP:g}, up to which no remedy helped our tiny models: none is needed"
    if k3 <= FAR:
        return f"between {NO_REMEDY_IN_STEP:g} and {FAR:g}, where we have no runs in step: watch the reward"
    return f"above {FAR:g}, where the sampler is another policy: `dc-trl calibrate` finds the cause"
