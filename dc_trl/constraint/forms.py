"""Forms of the constraint: how the discrepancy of tokens enters the objective with the weight λ.

A form is a function of the sampled tokens and the measure. It returns a coefficient c for each token, and the trainer
penalises the advantage with it: Ã = Â − λ·c. Below, π = π_train and q = π_inf are the probabilities of a sampled
token, both detached, and D is their signed discrepancy: π − q, π/q − 1 or log π/q.

======================== ============================ ======================================================
form                     c                            sampled tokens estimate the gradient of
======================== ============================ ======================================================
``injected``             δ = |D|                      E_π[δ] with δ held fixed (arXiv 2606.08779, eq. 8)
``quadratic``            D·∂D/∂π                      ½ Σ_a D(a)² (arXiv 2606.08779, appendix B)
``log_ratio``            log π/q                      ½ E_q[(log π/q)²]
======================== ============================ ======================================================

The tokens of a batch are samples of q, and without a correction their score functions have no weight π/q. So the
gradient of ``log_ratio`` is exact. Those of the two forms above it are exact for samples of π, and nearly if π ≈ q.

A user's own function has the signature of `quadratic` and is named `module:function`; docs/corrections.md shows one.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from ..sampled_tokens import SampledTokens, bounded_log_ratio
from ..settings.fields import resolve
from .discrepancy import discrepancy_penalty, signed_discrepancy, token_discrepancy
from .settings import ConstraintSettings, Measure


# Least probability that anything is divided by: 1/q and 1/π of rare tokens have no bound, and one such token would
# outweigh a batch. The gradient is exact for tokens above it.
PROBABILITY_FLOOR = 1e-3


# A form with its settings: the penalty of each sampled token, shape (B, T), 0 at unscored tokens, for
# `SampledTokens.penalised`. Their log π_train is from before the first optimizer step on the batch.
Form: TypeAlias = Callable[[SampledTokens], Tensor]
# The coefficient of each token, shape (B, T), without a gradient.
Coefficient = Callable[..., Tensor]  # (tokens: SampledTokens, measure: Measure)


def injected(tokens: SampledTokens, measure: Measure) -> Tensor:
    """Return δ, the paper's penalty (arXiv 2606.08779, eqs. 3, 4 and 8)."""
    return token_discrepancy(tokens.train_logps, tokens.infer_logps, measure)


def quadratic(tokens: SampledTokens, measure: Measure) -> Tensor:
    """Return D·∂D/∂π: the score function's coefficient in the gradient of ½ Σ_a D(a)² (arXiv 2606.08779, appendix B).

    It is π − q for the difference, (π/q − 1)/q for the ratio and log(π/q)/π for the logarithm and its square. The
    divisors are at least 1e-3, and log π/q is clamped to ±20.
    """
    gap = signed_discrepancy(tokens.train_logps, tokens.infer_logps, measure)
    train, infer = tokens.detached_logps
    if measure == "prob_diff":
        return gap
    if measure == "prob_ratio":
        return gap / infer.exp().clamp(min=PROBABILITY_FLOOR)
    return bounded_log_ratio(train, infer) / train.exp().clamp(min=PROBABILITY_FLOOR)


def log_ratio(tokens: SampledTokens, measure: Measure) -> Tensor:
    """Return log π/q, clamped to ±20, for every measure. It gives the exact gradient of ½ E_q[(log π/q)²].

    The squared log ratio of Kimi k1.5 (arXiv 2501.12599) is related. Near q this is also the gradient of KL(π ‖ q),
    in which each token has the additional weight π/q, and which other trainers subtract with a fixed weight (`kl_tau`
    of prime-rl). At a KL of 0.03 nats the two differ by a third.
    """
    return bounded_log_ratio(*tokens.detached_logps)


COEFFICIENTS: dict[str, Coefficient] = {"injected": injected, "quadratic": quadratic, "log_ratio": log_ratio}


def coefficient_of(settings: ConstraintSettings) -> Coefficient:
    """Return the coefficient that `constraint_form` names.

    Raises:
        ValueError: it does not name a form; see `resolve`.
    """
    return resolve("constraint_form", settings.constraint_form, COEFFICIENTS, measure=settings.discrepancy_measure)


def form_of(settings: ConstraintSettings) -> Form | None:
    """Return the form that the settings ask for; None where δ is only measured.

    The settings give the measure of δ and D, whether a token has its own coefficient or its trajectory's mean, and the
    δ up to which a token is not penalised (see `discrepancy_penalty`).
    """
    if settings.constraint == "none":
        return None
    coefficient, measure = coefficient_of(settings), settings.discrepancy_measure

    def form(tokens: SampledTokens) -> Tensor:
        delta = injected(tokens, measure)
        coefficients = delta if coefficient is injected else coefficient(tokens, measure=measure)
        if coefficients.shape != delta.shape:
            raise ValueError(
                f"constraint_form={settings.constraint_form!r} returned shape {tuple(coefficients.shape)} for tokens "
                f"of shape {tuple(delta.shape)}: return a coefficient for each token."
            )
        return discrepancy_penalty(
            delta, tokens.scored, settings.discrepancy_level, settings.discrepancy_margin, coefficients
        )

    return form
