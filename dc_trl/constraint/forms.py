"""Forms of the constraint: how the discrepancy of tokens enters the objective, λ times.

A form is a value: a function of log-probabilities, advantages and λ. The trainer calls the one that it was given and
does not know which it is. The symbols are those of `dc_trl.constraint.discrepancy`.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from .discrepancy import discrepancy_penalty, token_discrepancy
from .settings import ConstraintSettings, Level, Measure


class Constrained(NamedTuple):
    """What a form makes of a micro-batch.

    Args:
        advantages: of each token, shape (B, T).
        penalty: what λ was multiplied with in them, shape (B, T), 0 at unscored tokens; for the statistics.
        loss: term that is added to the loss, a scalar with a gradient, as a mean over the micro-batch and with λ in
            it; None where the form acts through the advantages alone.
    """

    advantages: Tensor
    penalty: Tensor
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


def injected(measure: Measure = "prob_diff", level: Level = "token", margin: float = 0.0) -> Form:
    """The paper's form: Ã = Â − λ·δ, with δ taken from the advantage (arXiv 2606.08779, eqs. 3, 4 and 8).

    Args:
        measure: of δ, see `token_discrepancy`.
        level: whether a token carries its own δ or its trajectory's mean, see `discrepancy_penalty`.
        margin: δ up to which a token is not penalised, at least 0.
    """

    def form(
        train_logps: Tensor, infer_logps: Tensor, scored: Tensor, advantages: Tensor, multiplier: float
    ) -> Constrained:
        delta = token_discrepancy(train_logps, infer_logps, measure)
        penalty = discrepancy_penalty(delta, scored, level, margin)
        return Constrained(advantages.unsqueeze(1) - multiplier * penalty, penalty)

    return form


# Above this k3 the sampler is another policy; docs/staleness.md has the runs.
_FAR = 1e-2


def drift_warning(form: str, k3: float) -> str | None:
    """What to tell whoever constrains by a form that pushes a far sampler further away; None where all is well.

    Args:
        form: name of the form, a value of `constraint_form`.
        k3: `discrepancy/k3_kl` of a generation batch, nats.
    """
    if form != "injected" or not k3 > _FAR:
        return None
    return (
        f"constraint_form='injected' meets discrepancy/k3_kl={k3:.3g}, above {_FAR:g}: it pushes down every token "
        "that differs, and in our runs with a sampler that lags so far it led to a policy without mismatch and "
        "without reward. Use a signed form, a smaller weight_sync_steps, a deployment_scheme of higher precision, or "
        "constraint='none'; see docs/staleness.md."
    )


def form_of(settings: ConstraintSettings) -> Form | None:
    """The form that the settings ask for; None where the discrepancy is only measured (`constraint="none"`)."""
    if settings.constraint == "none":
        return None
    return injected(settings.discrepancy_measure, settings.discrepancy_level, settings.discrepancy_margin)
