"""Forms of the constraint: how the discrepancy of tokens enters the objective, λ times.

A form is a value: a function of log-probabilities, advantages and λ. The trainer calls the one that it was given and
does not know which it is. The symbols are those of `dc_trl.constraint.discrepancy`; π = π_train and q = π_inf are the
probabilities of a sampled token, both detached, and D is their signed discrepancy: π − q, π/q − 1 or log π/q.

======================== ============================ ======================================================
form                     Ã = Â − λ·…                  the gradient, by sampled tokens, of
======================== ============================ ======================================================
``injected``             δ = |D|                      E_π[δ] with δ held fixed (arXiv 2606.08779, eq. 8)
``complete``             δ + ∂δ/∂log π                E_π[δ], the gradient of δ included
``quadratic``            D·∂D/∂π                      ½ Σ_a D(a)² (arXiv 2606.08779, appendix B)
``log_ratio``            log π/q                      ½ E_q[(log π/q)²]
``two_sided_kl``         Â, and a term of the loss    mean KL(π_{θ+Δ} ‖ π_θ) over contexts, in both policies
``two_sided_l1``         Â, and a term of the loss    mean |π_{θ+Δ} − π_θ| of sampled tokens, in both policies
======================== ============================ ======================================================

The tokens of a batch are samples of q, and without a correction their score functions have no weight π/q. So the
gradient of ``log_ratio`` is exact. Those of the three forms above it hold for samples of π, and nearly where π is near
q.

In the last two θ + Δ are the quantized weights, Δ held fixed: the gradient passes straight through the rounding.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .discrepancy import bounded_log_ratio, detached, discrepancy_penalty, signed_discrepancy, token_discrepancy
from .settings import PUSHES, TWO_SIDED, ConstraintSettings, Level, Measure
from .thresholds import CLIP_COSTS_IN_STEP, FAR, PULLS_HARM_IN_STEP


# Below it a probability counts as this much where it is divided by: 1/q and 1/π of rare tokens have no bound, and one
# such token would outweigh a batch. The gradient is exact for tokens above it.
PROBABILITY_FLOOR = 1e-3
# Log-probabilities that are closer have no sign: two float32 forwards of the same weights differ by so much.
RESOLUTION = 1e-5


class Constrained(NamedTuple):
    """What a form makes of a micro-batch.

    Args:
        advantages: of each token, shape (B, T).
        penalty: what λ was multiplied with in them, shape (B, T), 0 at unscored tokens; for the statistics. None where
            the form leaves the advantages alone.
        loss: term that is added to the loss λ times, a scalar with a gradient, as a mean over the micro-batch; None
            where the form acts through the advantages alone, and before the loss is computed.
    """

    advantages: Tensor
    penalty: Tensor | None
    loss: Tensor | None = None


class Form(Protocol):
    """A form of the constraint."""

    def __call__(
        self, train_logps: Tensor, infer_logps: Tensor, scored: Tensor, advantages: Tensor, multiplier: float
    ) -> Constrained:
        """Constrains a micro-batch.

        Args:
            train_logps: log π_train, shape (B, T), nats: from before the first optimizer step on the batch where
                advantages are penalised, of the loss's own forward, with a gradient, where the loss is computed.
            infer_logps: log π_inf of the same tokens, shape (B, T), nats.
            scored: boolean, shape (B, T).
            advantages: Â of each trajectory, shape (B,).
            multiplier: λ ≥ 0.
        """


# (log π, log q, measure) → what a token carries; shapes (B, T).
Coefficient = Callable[[Tensor, Tensor, Measure], Tensor]


def complete_coefficient(train_logps: Tensor, infer_logps: Tensor, measure: Measure) -> Tensor:
    """δ + ∂δ/∂log π: the score function's coefficient in the whole gradient of E_π[δ].

    The paper's derivation (arXiv 2606.08779, eq. 8) stops at δ. The second term is sign(D)·π for the difference,
    sign(D)·π/q for the ratio, sign(D) for the logarithm; the sign of log-probabilities within 1e-5 is 0.
    """
    gap = signed_discrepancy(train_logps, infer_logps, measure)
    train, infer = detached(train_logps, infer_logps)
    sign = gap.sign().where((train - infer).abs() > RESOLUTION, 0.0)
    return gap.abs() + sign * _slope(train, infer, measure)


def quadratic_coefficient(train_logps: Tensor, infer_logps: Tensor, measure: Measure) -> Tensor:
    """D·∂D/∂π: the score function's coefficient in the gradient of ½ Σ_a D(a)² (arXiv 2606.08779, appendix B).

    π − q for the difference, (π/q − 1)/q for the ratio, log(π/q)/π for the logarithm. The divisors are at least 1e-3,
    and log π/q is clamped to ±20.
    """
    gap = signed_discrepancy(train_logps, infer_logps, measure)
    train, infer = detached(train_logps, infer_logps)
    if measure == "prob_diff":
        return gap
    if measure == "prob_ratio":
        return gap / infer.exp().clamp(min=PROBABILITY_FLOOR)
    return bounded_log_ratio(train, infer) / train.exp().clamp(min=PROBABILITY_FLOOR)


def log_ratio_coefficient(train_logps: Tensor, infer_logps: Tensor, measure: Measure) -> Tensor:
    """log π/q, clamped to ±20, whatever the measure: exact for the gradient of ½ E_q[(log π/q)²], by tokens of q.

    Kin: the squared log ratio of Kimi k1.5 (arXiv 2501.12599). Near q it is also the gradient of KL(π ‖ q), of which
    each token has the weight π/q besides, and which other trainers subtract with a fixed weight (`kl_tau` of
    prime-rl). At a KL of 0.03 nats the two differ by a third.
    """
    return bounded_log_ratio(*detached(train_logps, infer_logps))


def _slope(train: Tensor, infer: Tensor, measure: Measure) -> Tensor:
    """∂D/∂log π."""
    if measure == "prob_diff":
        return train.exp()
    if measure == "prob_ratio":
        return bounded_log_ratio(train, infer).exp()
    return torch.ones_like(train)


def through_advantages(
    coefficient: Coefficient | None = None,
    measure: Measure = "prob_diff",
    level: Level = "token",
    margin: float = 0.0,
) -> Form:
    """A form that acts through the advantages: Ã = Â − λ·coefficient.

    Args:
        coefficient: what a token carries; None: its δ.
        measure: of δ and D, see `token_discrepancy`.
        level: whether a token carries its own coefficient or its trajectory's mean, see `discrepancy_penalty`.
        margin: δ up to which a token is not penalised, at least 0.
    """

    def form(
        train_logps: Tensor, infer_logps: Tensor, scored: Tensor, advantages: Tensor, multiplier: float
    ) -> Constrained:
        delta = token_discrepancy(train_logps, infer_logps, measure)
        carried = None if coefficient is None else coefficient(train_logps, infer_logps, measure)
        penalty = discrepancy_penalty(delta, scored, level, margin, carried)
        return Constrained(advantages.unsqueeze(1) - multiplier * penalty, penalty)

    return form


def injected(measure: Measure = "prob_diff", level: Level = "token", margin: float = 0.0) -> Form:
    """The paper's form: Ã = Â − λ·δ, with δ taken from the advantage (arXiv 2606.08779, eqs. 3, 4 and 8)."""
    return through_advantages(None, measure, level, margin)


def two_sided(divergence: Callable[[], Tensor]) -> Form:
    """A form that acts through the loss: λ times the mean divergence of the policy from its quantized self.

    A sampler that is quantized anew from each step's weights follows them: what pulls π_θ alone towards it moves both.
    So the gradient flows through both. The form is ours.

    Args:
        divergence: of each token at the inputs of the present loss, shape (B, T), with a gradient.
    """

    def form(
        train_logps: Tensor, infer_logps: Tensor, scored: Tensor, advantages: Tensor, multiplier: float
    ) -> Constrained:
        loss = None
        if train_logps.requires_grad:
            loss = divergence().where(scored, 0.0).sum() / scored.sum().clamp(min=1)
        return Constrained(advantages.unsqueeze(1).expand_as(train_logps), None, loss)

    return form


_COEFFICIENTS: dict[str, Coefficient | None] = {
    "injected": None,
    "complete": complete_coefficient,
    "quadratic": quadratic_coefficient,
    "log_ratio": log_ratio_coefficient,
}


def drift_warning(settings: ConstraintSettings, k3: float, may_lag: bool, clips: bool = False) -> str | None:
    """What to tell whoever uses a method that, so far from its sampler, led our runs to little reward; None elsewhere.

    Args:
        settings: whose constraint and correction act on the run.
        k3: `discrepancy/k3_kl` of a generation batch, nats.
        may_lag: whether the settings let the sampler have older weights than the policy.
        clips: whether the loss itself clips the ratio to the sampler, as that of AsyncGRPO.
    """
    constrained = settings.constraint != "none"
    # The two-sided forms see neither the sampler nor its lag; in two bits in step they did no harm.
    form = settings.constraint_form if constrained and settings.constraint_form not in TWO_SIDED else None
    pushes = form in PUSHES
    pulls = not pushes and (form is not None or clips or settings.rollout_correction == "ppo_clip")
    if not pushes and pulls == may_lag:  # a pull repaired the runs with a lag; those in step needed none
        return None
    far = FAR if not pulls else PULLS_HARM_IN_STEP if form is not None else CLIP_COSTS_IN_STEP
    if not k3 > far:
        return None
    meets = f"meets discrepancy/k3_kl={k3:.3g}, above {far:g}"
    if pushes:
        remedy = "Use constraint='none', or a deployment_scheme of higher precision; see docs/study.md."
        if may_lag:
            remedy = (
                "Use a signed form, a smaller weight_sync_steps, a deployment_scheme of higher precision, or "
                "constraint='none'; see docs/staleness.md."
            )
        return (
            f"constraint_form={form!r} {meets}: it pushes down tokens that differ, and with λ 0.1 or more most of our "
            f"runs so far from the sampler ended without reward. {remedy}"
        )
    if not pulls:
        method = f"constraint_form={settings.constraint_form!r}" if constrained else "constraint='none'"
        return (
            f"{method} {meets}, with a sampler whose weights may lag: in our runs that ended so far apart GRPO lost "
            "8 points of accuracy or more. Truncations and masks won back a part, two-sided forms nothing. Use a "
            "smaller weight_sync_steps, constraint='static' with constraint_form='log_ratio' and lambda_init=0.5, or "
            "rollout_correction='ppo_clip'; see docs/staleness.md."
        )
    if form is None:
        pull = f"rollout_correction={settings.rollout_correction!r}"
        harm = "PPO's clip cost 4 points of accuracy in int4, and much of it, or all, in int3 and int2"
    else:
        pull = f"constraint_form={form!r}"
        harm = "the log ratio and the quadratic form lost most of the accuracy in int3 and int2"
    return (
        f"{pull} {meets}, with a sampler that has the present weights and follows the policy. In our runs {harm}. Use "
        "train_through_quantization, a deployment_scheme of higher precision, or neither constraint nor correction; "
        "see docs/study.md."
    )


def lag_warning(settings: ConstraintSettings, lag: str) -> str | None:
    """What to tell whoever gives a form that pushes a sampler whose weights lag; None for other settings.

    Args:
        settings: of the run.
        lag: what lets the sampler have older weights than the policy, the setting with its value.
    """
    if settings.constraint == "none" or settings.constraint_form not in PUSHES:
        return None
    return (
        f"constraint_form={settings.constraint_form!r} with {lag}: the form pushes down each token that differs, and "
        "a sampler that lags differs more at each step. Our runs with such a lag and λ 0.1 ended without reward. Use "
        "constraint_form='log_ratio' with constraint='static' and lambda_init=0.5, or rollout_correction='ppo_clip' "
        "with constraint='none'; see docs/staleness.md."
    )


def form_of(settings: ConstraintSettings, divergence: Callable[[], Tensor] | None = None) -> Form | None:
    """The form that the settings ask for; None where the discrepancy is only measured (`constraint="none"`).

    Args:
        divergence: of the two-sided forms, see `two_sided`.
    """
    if settings.constraint == "none":
        return None
    if settings.constraint_form in TWO_SIDED:
        assert divergence is not None
        return two_sided(divergence)
    return through_advantages(
        _COEFFICIENTS[settings.constraint_form],
        settings.discrepancy_measure,
        settings.discrepancy_level,
        settings.discrepancy_margin,
    )
