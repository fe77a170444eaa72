"""`Constraint`: sampled tokens in, advantages and metrics out.

It holds the form of the constraint, the correction, the multiplier λ and the statistics, and knows no trainer. Within
an iteration, a generation batch:

    constrained = constraint.apply(tokens)     # a micro-batch: penalised advantages, weights
    constraint.count(constrained)              # once for each of its tokens
    report = constraint.report(gather)         # of all micro-batches and processes: δ̄ and the other metrics
    constraint.end_iteration()                 # one step of dual ascent (arXiv 2606.08779, eq. 11)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..sampled_tokens import SampledTokens
from .corrections import correction_of
from .forms import form_of
from .lagrangian import LagrangeMultiplier
from .metrics import BatchStatistics, batch_metrics, mean_discrepancy
from .thresholds import drift_warning


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .settings import ConstraintSettings

_NOTHING_MEASURED = (
    "No token that enters the loss has log-probabilities from both engines (drop_zero_std_groups may have dropped all "
    "groups): nothing is measured in this batch."
)


class Constrained(NamedTuple):
    """A micro-batch after the form and the correction have acted.

    Args:
        tokens: the tokens, whose advantages are penalised, Ã = Â − λ·penalty; not yet weighted.
        penalty: what λ has multiplied, shape (B, T), 0 at unscored tokens; None without a constraint.
        weights: of the correction, shape (B, T); None without one.
    """

    tokens: SampledTokens
    penalty: Tensor | None
    weights: Tensor | None
    weighs_score: bool = False  # whether the weights are applied with the score, and not to the advantages

    @property
    def columns(self) -> dict[str, Tensor]:
        """What changes in the batch."""
        if self.weights is None:
            return {} if self.penalty is None else {"advantages": self.tokens.advantages}
        if self.weighs_score:
            return {"advantages": self.tokens.advantages, "correction_weights": self.weights}
        return {"advantages": self.weights * self.tokens.token_advantages}


class Report(NamedTuple):
    """What a generation batch, or an evaluation, says of the mismatch: metrics by name, and what to warn of."""

    metrics: dict[str, float]
    warnings: list[str]


class Constraint:
    """How the discrepancy between two engines enters the advantages, and what is measured of it.

    Args:
        settings: settings of the run.
        ages: number of ages, from 0 on, by which the lag's part is also measured, where one batch has several.
        clips: whether the loss itself clips the ratio to the sampler, as that of AsyncGRPO does.

    Attributes:
        form (`Form` or `None`): how λ enters the objective; None where the discrepancy is only measured.
        correction (`Correction` or `None`): how rollouts are corrected.
        multiplier (`LagrangeMultiplier`): λ; it stays at its first value unless `constraint="lagrangian"`.
        weighs_score (`bool`): whether the weights of the correction are applied with the score; see
            `parts.score_centering`, which sets it.
        restrictions (`dict[str, Any]`): settings with which the engine does not sample from the policy's
            distribution, where the discrepancy contains what they change; none by default.
    """

    def __init__(self, settings: ConstraintSettings, ages: int = 0, clips: bool = False):
        self._settings, self._clips = settings, clips
        self.form = form_of(settings)
        self.correction = correction_of(settings)
        self.restrictions: dict[str, Any] = {}
        self.weighs_score = False
        self._statistics = {"train": BatchStatistics(settings, ages), "eval": BatchStatistics(settings)}
        self.start_again()

    def start_again(self) -> None:
        """Forget an earlier training: λ is `lambda_init`."""
        self.multiplier = LagrangeMultiplier.of(self._settings)
        self._statistics["train"].clear()
        self._mean_discrepancy: float | None = None  # of the generation batch in use, once it was reported
        self._warned = False

    def apply(self, tokens: SampledTokens) -> Constrained:
        """Return a micro-batch with penalised advantages and the weights of its tokens."""
        penalty = weights = None
        if self.form is not None:
            penalty = self.form(tokens.of_part(self._settings.constraint_target))
            tokens = tokens.penalised(penalty, self.multiplier.value)
        if self.correction is not None:
            weights = self.correction(tokens.of_part(self._settings.rollout_correction_target))
        return Constrained(tokens, penalty, weights, self.weighs_score)

    def count(self, constrained: Constrained, mode: str = "train") -> None:
        """Add a micro-batch to the statistics of its generation batch, or of an evaluation (`mode="eval"`)."""
        self._statistics[mode].add(constrained.tokens, constrained.penalty, constrained.weights)

    def report(
        self,
        gather: Callable[[Tensor], Tensor],
        mode: str = "train",
        age: int | None = None,
    ) -> Report:
        """Return what was counted since the last report in all processes. Every process has to call it.

        Args:
            gather: concatenates tensors of shape (1, n) of all processes into (processes, n), as accelerate's does.
            mode: `"train"` or `"eval"`.
            age: optimizer steps from the weights that sampled to the trainer's; None where batches have several.
        """
        sums = self._statistics[mode].reduce(gather)
        if sums is None:
            return Report({}, [])
        if not sums["tokens"]:
            return Report({}, [_NOTHING_MEASURED])
        settings, warnings = self._settings, []
        multiplier, target = None if self.form is None else self.multiplier, settings.constraint_target
        metrics = batch_metrics(sums, multiplier, target, bool(self.restrictions))
        mean = mean_discrepancy(sums, target)
        if mean is None:
            correction = settings.rollout_correction
            warnings.append(f"rollout_correction={correction!r} masks all tokens: δ̄ of the batch is not known.")
        if mode == "train":
            self._mean_discrepancy = mean
            warning = None if self.restrictions else drift_warning(settings, metrics, age, self._clips)
            if warning is not None and not self._warned:
                self._warned = True
                warnings.append(warning)
        return Report(metrics, warnings)

    def end_iteration(self) -> None:
        """Move λ by the mean discrepancy of the generation batch that is used up, if it was measured."""
        if self._settings.constraint == "lagrangian" and self._mean_discrepancy is not None:
            self.multiplier.update(self._mean_discrepancy)
        self._mean_discrepancy = None

    def state_dict(self) -> dict[str, Any]:
        """Return λ and the discrepancy of the generation batch in use, as JSON values."""
        return {"lagrange_multiplier": self.multiplier.state_dict(), "batch_discrepancy": self._mean_discrepancy}

    def load_state_dict(self, state: dict[str, Any], within_batch: bool) -> None:
        """Continue from `state_dict`; `within_batch` says whether the generation batch is resumed too."""
        self.multiplier.load_state_dict(state["lagrange_multiplier"])
        if within_batch:
            self._mean_discrepancy = state["batch_discrepancy"]
