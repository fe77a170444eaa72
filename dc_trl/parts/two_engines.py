"""DC-GRPO within a step: an engine samples, and the constraint acts on what it and the policy say of each token.

When TRL has computed `old_per_token_logps` (the weights change within a generation batch), these are log π_train at
the weights from before the first step on the batch, and the advantages (B,) are at once replaced by penalised ones of
tokens, (B, T). When it has not, the weights stay the same until the batch is used up, and the loss's own forward gives
the same numbers: the advantages are replaced between that forward and their first use. Neither takes a forward more.
"""

from __future__ import annotations

from accelerate.logging import get_logger

from ..sampled_tokens import SampledTokens
from ..sampling.empty_completions import sampled_only
from .part import Part


logger = get_logger(__name__)


class TwoEngines(Part):
    """Samples by `trainer.sampler`, and gives `trainer.constraint` the log-probabilities of both engines.

    It is the first part, wherever rollouts can have log-probabilities: with a `deployment_scheme`, with vLLM and with
    a `rollout_func`.
    """

    def prompts(self, prompts):
        self.trainer.sampler.begin_batch(prompts)

    def turn(self, sample, prompt_ids):
        return self.trainer.sampler.turn(sample, prompt_ids)

    def rollout(self, rollout):
        """Refuse completions without log-probabilities where something needs them; otherwise warn."""
        trainer = self.trainer
        trainer.sampler.end_batch(len(rollout.completion_ids))
        rollout.mask = sampled_only(rollout.completion_ids, rollout.mask)
        if rollout.logprobs is not None:
            return
        args = trainer.args
        if args.compared_by is not None:
            raise ValueError(
                f"{args.comparison} needs the rollouts' log-probabilities, and the engine returned none "
                f"(logprobs=None): return them from rollout_func, or set {args.without_comparison}."
            )
        if trainer.rollout_func is not None and trainer.model.training and not trainer._first_batch_seen:
            logger.warning("The mismatch is not measured: rollout_func returns no logprobs. Return them too.")

    def compare(self, batch, train_logps):
        """Measure a batch, replace its advantages of trajectories by those of tokens, and count these."""
        if "sampling_per_token_logps" not in batch:
            return
        trainer, split = self.trainer, self.trainer.args.split_by is not None
        with trainer.clock.part("constraint"):
            compared = batch.pop("compared_logps", train_logps)
            constrained = trainer.constraint.apply(SampledTokens.of_batch(batch, compared, trainer.sampler.age, split))
            batch |= constrained.columns
            passes = trainer._step % trainer.micro_batches_per_generation // trainer.args.steps_per_generation
            if passes == 0 or not trainer.model.training:  # later the same tokens, at the same weights, come again
                with trainer.clock.part("metrics"):
                    trainer.constraint.count(constrained, trainer.mode)
        if "old_per_token_logps" in batch and trainer.model.training:  # of the whole generation batch
            trainer.wait_for_device("logps")
            self._report("train")

    def trained(self, done):
        """Log the metrics when each token was seen once, and move λ when the generation batch is used up."""
        trainer = self.trainer
        if done == trainer.args.steps_per_generation % trainer.micro_batches_per_generation:
            self._report("train")
        if done == 0:
            trainer.constraint.end_iteration()

    def evaluated(self):
        # Reduced over the whole evaluation: a mean of batch means would weigh the last, shorter batch too much.
        self._report("eval")

    def _report(self, mode: str) -> None:
        """Log what the constraint has measured since the last report."""
        trainer = self.trainer
        with trainer.clock.part("metrics"):
            report = trainer.constraint.report(trainer.accelerator.gather, mode, trainer.sampler.age)
            for warning in report.warnings:
                logger.warning(warning)
            for name, value in report.metrics.items():
                trainer.add_metric(name, value, mode)

    def state_dict(self):
        return self.trainer.constraint.state_dict()

    def load_state_dict(self, state):
        trainer = self.trainer
        within_batch = trainer._step % trainer.micro_batches_per_generation > 0
        trainer.constraint.load_state_dict(state, within_batch)
