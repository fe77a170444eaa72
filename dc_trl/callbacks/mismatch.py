"""Metrics of the mismatch in a run of TRL's own trainer."""

from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from ..constraint.metrics import BatchStatistics, batch_metrics
from ..constraint.settings import ConstraintSettings
from ..sampled_tokens import SampledTokens, loss_mask
from ..settings.neutral_sampling import SAMPLING_FIELDS, restrictions
from ..trainer import DCGRPOTrainer


class MismatchCallback(TrainerCallback):
    """Logs the mismatch between the two engines of a [`~trl.GRPOTrainer`], under the names of [`DCGRPOTrainer`].

    It reads the log-probabilities that TRL has computed, runs no forward of its own and changes nothing. Each
    generation batch gives one value of `discrepancy/mean`, `discrepancy/k3_kl` and so on (docs/metrics.md), which TRL
    logs with its own metrics. The batch is measured at the weights that it was scored with, over all processes.

    TRL has both log-probabilities where vLLM samples and `vllm_importance_sampling_correction` is on, its default.

    Args:
        trainer ([`~trl.GRPOTrainer`]): trainer whose rollouts are measured.

    Raises:
        ValueError: the trainer is a [`DCGRPOTrainer`], which measures by itself; or the first generation batch lacks
            the log-probabilities of one of the engines.
    """

    def __init__(self, trainer: GRPOTrainer):
        if isinstance(trainer, DCGRPOTrainer):
            raise ValueError(
                "trainer is a DCGRPOTrainer, which logs these metrics by itself: leave MismatchCallback out."
            )
        self._trainer = trainer
        self._statistics = BatchStatistics(ConstraintSettings())
        self._measured: Any = None  # the generation batch that was measured last
        args = trainer.args
        sampling = {name: getattr(args, name) for name in SAMPLING_FIELDS} | (args.generation_kwargs or {})
        self._truncated = any(restrictions(sampling, temperature=args.temperature))

    def on_step_end(self, args, state, control, **kwargs):
        batch = self._trainer._buffered_inputs
        if batch is self._measured:
            return  # several micro-batches and optimizer steps use one generation batch
        self._measured = batch
        for micro_batch in batch:
            self._statistics.add(_tokens_of(micro_batch))
        sums = self._statistics.reduce(self._trainer.accelerator.gather)
        if sums is not None and sums["tokens"]:
            for name, value in batch_metrics(sums, truncated=self._truncated).items():
                self._trainer._metrics["train"][name].append(value)

    on_substep_end = on_step_end  # an optimizer step may use several generation batches


def _tokens_of(batch: dict[str, Any]) -> SampledTokens:
    train, infer = batch.get("old_per_token_logps"), batch.get("sampling_per_token_logps")
    if infer is None:
        raise ValueError(
            "the rollouts have no log-probabilities of the sampled tokens (model.generate has none): set "
            "use_vllm=True, return `logprobs` from rollout_func, or use DCGRPOTrainer with a deployment_scheme, whose "
            "replica has them."
        )
    if train is None:
        raise ValueError(
            "TRL has not scored the rollouts with the policy: set use_vllm=True and "
            "vllm_importance_sampling_correction=True, its default, or use DCGRPOTrainer, which needs neither."
        )
    return SampledTokens.of(train, infer, loss_mask(batch), batch["advantages"])
