"""`DCGRPOTrainer`: TRL's GRPO trainer with the discrepancy measured token by token, and constrained.

From top to bottom this file is the paper's algorithm: rollouts, penalised advantages, the loss, the statistics of the
generation batch, one step of dual ascent. Sampling is in `trainers/sampling.py`, the life of a run in
`trainers/run.py`. Nothing of TRL is copied; `trl_hooks.py` gives its private hooks the names that are used here.

When TRL has computed `old_per_token_logps` (the weights change within a generation batch), these are log π_train at
the weights from before the first step on the batch, and the advantages (B,) are at once replaced by penalised ones of
tokens, (B, T). When it has not, the weights stay the same until the batch is used up, and the loss's own forward gives
the same numbers: the advantages are replaced between that forward and their first use. Neither takes a forward more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl.trainer.utils import get_config_model_id

from .config import DCGRPOConfig
from .constraint.corrections import correction_of
from .constraint.forms import form_of
from .constraint.lagrangian import LagrangeMultiplier
from .constraint.statistics import BatchStatistics, batch_metrics, zero_std_groups
from .constraint.thresholds import drift_warning
from .records.clock import timed
from .records.verdict import NOT_MEASURED, first_batch
from .rollouts.buffer import with_nonempty_completions
from .rollouts.neutral_sampling import truncation_warning
from .sampled_tokens import SampledTokens, loss_mask
from .settings.contradictions import MEAN_OVER_COMPLETIONS
from .trainers.run import RunTrainer
from .trainers.sampling import LAG_COLUMNS, total_rewards


if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from peft import PeftConfig, PeftModel
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import (
        BitsAndBytesConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
        TrainerCallback,
    )
    from trl import GRPOTrainer

    from .grading.checked_reward import RewardFunction
    from .rollouts.score_centering import ScoreCentering

    Reward: TypeAlias = str | PreTrainedModel | RewardFunction

logger = get_logger(__name__)


class DCGRPOTrainer(RunTrainer):
    r"""GRPO under a constraint on the discrepancy between the training and the sampling engine (DC-GRPO).

    It takes the arguments of [`~trl.GRPOTrainer`], with [`DCGRPOConfig`] in place of `GRPOConfig`. The rollouts must
    have the log-probabilities of the sampled tokens, as those of vLLM (`use_vllm=True`), of the in-process replica
    (`deployment_scheme`) or of a `rollout_func` do. With `constraint="none"`, the default, the losses are TRL's: bit
    for bit with `length_aware_batches=False`, otherwise up to rounding. `recipe="paper"` is the paper's method.

    `train` writes `history.jsonl`, `settings.json` and `run.png` into `args.output_dir` and, with `deployment_scheme`,
    `deployment/` for `vllm serve`, which `save_model` writes beside the model: see `export_run`.

    Args:
        model: policy to be trained: a causal language model, or its Hub id or directory, which is loaded with
            `args.model_init_kwargs`.
        args: settings; by default those of `DCGRPOConfig`, as in TRL. Nothing is measured then, unless a
            `rollout_func` returns log-probabilities.
        train_dataset: rows with a `prompt`, plain or conversational. It may be omitted if an environment gives the
            prompts. A stream needs `args.max_steps`, and begins anew when it ends before.
        quantization_config: quantization of a model that is given by name, for QLoRA together with `peft_config`.
        rollout_func: function that samples in place of an engine. It takes prompts and the trainer, and returns
            `prompt_ids`, `completion_ids` and `logprobs`. It contradicts `deployment_scheme` without vLLM.

    Attributes:
        lagrange_multiplier (`LagrangeMultiplier`): λ; constant with `constraint="static"`.
        form (`Form` or `None`): how λ enters the objective, see `dc_trl.constraint.forms`; with `None`, the
            discrepancy is only measured.
        correction (`Correction` or `None`): how rollouts are corrected, see `dc_trl.constraint.corrections`.
        replica (`Replica` or `None`): in-process engine that samples, if `deployment_scheme` is set without vLLM.

    Raises:
        TypeError: `args` is not a `DCGRPOConfig`, or another argument has the wrong type.
        ValueError: the constraint cannot be measured with these arguments, they contradict each other, or nothing
            would be trained (see docs/troubleshooting.md).

    Example:

    ```python
    from dc_trl import DCGRPOConfig, DCGRPOTrainer

    trainer = DCGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=reward,
        args=DCGRPOConfig("out", deployment_scheme="fp8", recipe="paper"),
        train_dataset=dataset,
    )
    trainer.train()  # then: vllm serve out/deployment
    ```
    """

    # Attributes of TRL
    beta: float  # coefficient of the KL term
    loss_type: str

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Reward | list[Reward] | None = None,
        args: DCGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable[[list[str], GRPOTrainer], dict[str, Any]] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    ):
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = DCGRPOConfig(f"{model_id.split('/')[-1]}-DC-GRPO", use_cpu=not torch.accelerator.is_available())
        if not isinstance(args, DCGRPOConfig):
            raise TypeError(f"args is a {type(args).__name__}: DCGRPOTrainer needs a DCGRPOConfig.")
        if rollout_func is not None:
            rollout_func = with_nonempty_completions(rollout_func)
        # Set before TRL's constructor, which may already call hooks of this class.
        self.form = form_of(args)
        self.correction = correction_of(args)
        self.lagrange_multiplier = LagrangeMultiplier.of(args)
        self._warned_of_mismatch = False
        self._seen_first_batch = False  # in the present call of `train`
        self._statistics = {mode: BatchStatistics(args) for mode in ("train", "eval")}
        # δ̄ of the present generation batch, from its measurement to the update of λ at the batch's end.
        self._mean_discrepancy: float | None = None
        # Of the completions that were scored last, of all processes, shape (N, functions), NaN where there is none.
        self._rewards_per_func: Tensor
        self._loss_inputs: dict[str, Any] | None = None  # of the loss that is being computed
        self._centred_weights: Tensor | None = None  # a correction's weights, shape (B, T), where the score is centred
        self._evaluation_set = ""  # name of the evaluation set in use, if there are several
        # log π_train of the batch that is being sampled, as it is compared with log π_inf; None until TRL has it.
        self._sampled_logps: Tensor | None = None
        self._counts_truncation = False  # whether the discrepancy contains what truncated sampling has cut off
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._centering: ScoreCentering | None = None
        if args.score_centering:
            from .rollouts.score_centering import ScoreCentering

            self._centering = ScoreCentering(
                self.model, self.replica, self.temperature, self.correction, args.score_centering_top_k
            )
        if not args.use_vllm and args.deployment_scheme is None and rollout_func is None:
            logger.warning(f"The mismatch will not be measured: {NOT_MEASURED}")

    # --- rollouts and their advantages ------------------------------------------------------------------------------

    def sample_and_score(self, inputs):
        self._sampled_logps = None
        batch = super().sample_and_score(inputs)
        rewards = total_rewards(self._rewards_per_func, self.reward_weights).unsqueeze(0)
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            rewards = self._rewards_per_func.T  # equal sums of different rewards have advantages
        if self.args.drop_zero_std_groups and self.model.training:
            self._drop_groups(batch, rewards)
        measured = "sampling_per_token_logps" in batch
        if self.model.training and not self._seen_first_batch:
            self._seen_first_batch = True
            self._look_at_first_batch(rewards, measured)
        if not measured and (needy := self.args.compared_by) is not None:
            raise ValueError(
                f"{needy}={getattr(self.args, needy)!r} needs the rollouts' log-probabilities, and the engine "
                f"returned none (logprobs=None): return them from rollout_func, or set {self.args.without_comparison}."
            )
        if measured and "old_per_token_logps" in batch:
            assert self._sampled_logps is not None
            self._constrain(batch, self._sampled_logps)
            for name in LAG_COLUMNS & batch.keys():
                del batch[name]  # which has served its purpose
            if self.model.training:
                self.wait_for_device("logps")
                self._report("train")
        return batch

    def take_rewards(self, rewards):
        super().take_rewards(rewards)
        self._rewards_per_func = rewards

    def _look_at_first_batch(self, rewards: Tensor, measured: bool) -> None:
        """Warn if the first batch shows that the run cannot learn or measure anything."""
        warning = first_batch(
            rewards.tolist(),
            self.num_generations,
            self.metrics_since_log("train")["completions/clipped_ratio"][-1],
            self.max_completion_length,
        )
        if warning is not None:
            logger.warning(warning)
        if not measured and self.rollout_func is not None:
            logger.warning("The mismatch is not measured: rollout_func returns no logprobs. Return them too.")

    def _drop_groups(self, batch: dict[str, Any], rewards: Tensor) -> None:
        """Mask the completions whose group has one reward; a row of `rewards` has those of all processes."""
        kept = ~torch.stack([zero_std_groups(row, self.num_generations) for row in rewards]).all(0)
        local = kept.view(self.accelerator.num_processes, -1)[self.accelerator.process_index]
        for name in {"completion_mask", "tool_mask"} & batch.keys():
            batch[name] = batch[name] * local.unsqueeze(1)
        batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()
        # A mean over completions counts the dropped ones as zeros, so the others get a larger weight.
        over_completions = self.loss_type in MEAN_OVER_COMPLETIONS
        batch["kept_weight"] = kept.any() * (len(kept) / kept.sum().clamp(min=1) if over_completions else 1.0)

    # --- the constraint on a micro-batch ----------------------------------------------------------------------------

    @timed("constraint")
    def _constrain(self, batch: dict[str, Any], train_logps: Tensor) -> None:
        """Measure a batch, replace its advantages of trajectories by the penalised ones of tokens, and count these.

        `train_logps` are those before the first optimizer step on the batch, shape (B, T), nats.
        """
        args, penalty, weights = self.args, None, None
        self._counts_truncation = self.truncates and "kept_counts" not in batch
        infer_logps = batch.get("kept_logps", batch["sampling_per_token_logps"])
        logps = train_logps.detach()  # a gradient would go through a user's form or correction into the loss
        lagged = None
        if args.split_by is not None:  # without a lag, the weights that sampled are those that train
            lagged = logps - batch["lag"] if "lag" in batch else batch.get("lagged_logps", logps)
        tokens = SampledTokens.of(logps, infer_logps, loss_mask(batch), batch["advantages"], lagged)
        tokens = tokens._replace(age=self.sampler.age)  # a batch is constrained before the next one is sampled
        if self.form is not None:
            penalty = self.form(tokens.of_part(args.constraint_target))
            tokens = tokens.penalised(penalty, self.lagrange_multiplier.value)
            batch["trajectory_advantages"], batch["advantages"] = batch["advantages"], tokens.advantages
        if self.correction is not None:
            weights = self.correction(tokens.of_part(args.rollout_correction_target))
            if self._centering is not None:
                self._centred_weights = weights  # applied with the score, within the loss
            else:
                batch["advantages"] = weights * tokens.token_advantages
        if self.model.training and self.completed_passes > 0:
            return  # the same tokens at the same weights were counted in the first pass
        with self.parts_clock.part("metrics"):
            self._statistics[self.mode].add(tokens, penalty, weights)

    # --- the loss ---------------------------------------------------------------------------------------------------

    def policy_loss(self, model, inputs):
        # A copy, because the buffered inputs are used again when num_iterations > 1.
        self._loss_inputs = dict(inputs)
        # The weight of the kept groups applies to the terms that are means over completions, to the policy's through
        # its advantages and to KL's through beta: entropy bonus and auxiliary loss have other means.
        weight = inputs["kept_weight"].item() if "kept_weight" in inputs else 1.0
        beta, self.beta = self.beta, self.beta * weight
        try:
            loss = super().policy_loss(model, self._loss_inputs)
        finally:
            self._loss_inputs = self._centred_weights = None
            self.beta = beta
        if weight > 0:
            return loss
        # Of a batch whose completions are all dropped TRL logs the entropy 0, and nothing is learned from it.
        self.metrics_since_log(self.mode)["entropy"][-1] = math.nan
        return loss * 0.0

    def score_tokens(self, model, *args, **kwargs):
        outputs = super().score_tokens(model, *args, **kwargs)
        # With truncated sampling, the engines are compared among the kept tokens.
        compared = outputs[0] if self.logps_among_kept is None else self.logps_among_kept
        inputs = self._loss_inputs
        if inputs is not None:  # the loss reads the advantages after this forward
            if "sampling_per_token_logps" in inputs and "old_per_token_logps" not in inputs:
                self._constrain(inputs, compared)
            if self._centering is not None and outputs[0].requires_grad:
                outputs = (self._centred(inputs, outputs[0], *args), *outputs[1:])
            if "kept_weight" in inputs:
                inputs["advantages"] = inputs["advantages"] * inputs["kept_weight"]
        elif self.scores_when_sampled and self._sampled_logps is None:  # before any reference model's
            self._sampled_logps = compared
        return outputs

    @timed("constraint")
    def _centred(
        self, inputs: dict[str, Any], train_logps: Tensor, input_ids: Tensor, attention_mask: Tensor, *args: Any
    ) -> Tensor:
        """Return log π_train with the centred score as its gradient; the values stay.

        A loss that multiplies the gradient w·s of a token by its advantage then has w·s − E_q[w·s] in its place, with
        its own clip and mean. The weights w of a correction are here, and not in the advantages, because the mean is
        taken away from tokens of weight 0 too.
        """
        assert self._centering is not None
        advantages, weights = inputs["advantages"], self._centred_weights
        centre = self._centering(input_ids, attention_mask, train_logps.shape[1], advantages, self._choices)
        scored = loss_mask(inputs).bool()
        sums = torch.cat([centre.drift[scored].sum(0), scored.sum().unsqueeze(0)]).unsqueeze(0)
        variation, norm, count = self.accelerator.gather(sums).sum(0).tolist()
        self.add_metric("discrepancy/drift_tv", variation / max(count, 1))
        self.add_metric("discrepancy/drift_l2", norm / max(count, 1))
        score = train_logps if weights is None else weights.to(train_logps.dtype) * train_logps
        centred = score - centre.score
        return train_logps.detach() + (centred - centred.detach())

    # --- the generation batch as a whole, and the multiplier --------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        done = self.micro_batches_done % self.micro_batches_per_generation
        if done == self.args.steps_per_generation % self.micro_batches_per_generation:
            self._report("train")  # the first pass is over: each token was seen once
        if done == 0:  # one step of dual ascent (arXiv 2606.08779, eq. 11)
            if self.args.constraint == "lagrangian" and self._mean_discrepancy is not None:
                self.lagrange_multiplier.update(self._mean_discrepancy)
            self._mean_discrepancy = None
        return loss

    @timed("metrics")
    def _report(self, mode: str) -> None:
        """Reduce the statistics over all processes and add them to TRL's metrics."""
        report = self._statistics[mode].reduce(self.accelerator.gather)
        if report is None:
            return
        if report.tokens == 0:
            logger.warning(
                "No token that enters the loss has log-probabilities from both engines (drop_zero_std_groups may have "
                "dropped all groups): nothing is measured in this batch."
            )
            return
        mean = report.constrained_discrepancy
        if mean is None:
            logger.warning(f"rollout_correction={self.args.rollout_correction!r} masks all tokens: λ stays as it is.")
        multiplier = None if self.form is None else self.lagrange_multiplier
        metrics = batch_metrics(report, multiplier, self._counts_truncation)
        for name, metric in metrics.items():
            self.add_metric(name, metric, mode)
        if mode == "train":
            self._mean_discrepancy = mean
            self._watch_mismatch(metrics)

    def _watch_mismatch(self, metrics: dict[str, float]) -> None:
        """Warn once if the method fails with such a mismatch."""
        if self._counts_truncation:
            remedy = (
                "set top_k too with a vLLM engine (at most 20 with vllm_mode='colocate'), return KeptLogProb from "
                "rollout_func, or sample without truncation"
            )
            warning: str | None = truncation_warning(self.args.truncations, remedy)
        else:
            warning = drift_warning(self.args, metrics, self.sampler.age)
        if warning is not None and not self._warned_of_mismatch:
            self._warned_of_mismatch = True
            logger.warning(warning)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        # TRL evaluates several sets, {"easy": …, "hard": …}, one by one with the prefixes "eval_easy", "eval_hard".
        self._evaluation_set = metric_key_prefix.removeprefix("eval").lstrip("_")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def log(self, logs, start_time=None):
        if "train_runtime" in logs:  # the last log; after an evaluation TRL would lose the training's last metrics
            self.model.train()
        if not self.model.training:
            # Reduced over the whole evaluation: a mean of batch means would weigh the last, shorter batch too much.
            self._report("eval")
            if self._evaluation_set:
                # TRL calls the metrics of every evaluation set by the same names.
                metrics = self.metrics_since_log("eval")
                for name in list(metrics):
                    metrics[f"{self._evaluation_set}_{name}"] = metrics.pop(name)
        super().log(logs, start_time)

    # --- what is started again, saved and resumed -------------------------------------------------------------------

    def start_again(self):
        super().start_again()
        self.lagrange_multiplier.load_state_dict(LagrangeMultiplier.of(self.args).state_dict())
        self._statistics["train"].clear()
        self._mean_discrepancy = None
        self._warned_of_mismatch = self._seen_first_batch = False

    def iteration_state(self):
        return super().iteration_state() | {
            "lagrange_multiplier": self.lagrange_multiplier.state_dict(),
            "batch_discrepancy": self._mean_discrepancy,
        }

    def load_iteration_state(self, state, within_batch):
        super().load_iteration_state(state, within_batch)
        self.lagrange_multiplier.load_state_dict(state["lagrange_multiplier"])
        if within_batch:
            self._mean_discrepancy = state["batch_discrepancy"]
