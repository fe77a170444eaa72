"""`DCGRPOTrainer`: TRL's GRPO trainer with the discrepancy measured token by token, and constrained.

Read from top to bottom it is the paper's algorithm: rollouts, penalised advantages, the loss, the statistics of the
generation batch, one step of dual ascent. What samples is in deployed_trainer.py, what is saved in
resumable_trainer.py. Nothing of TRL is copied; docs/hooks.md lists the private hooks that these files lean on.

- `_generate_and_score_completions` returns the rollouts with their advantages (B,); per-token advantages (B, T) are
  the shape that TRL supports for subclasses, and the buffer's shuffle and split keep them aligned with the tokens.
- When TRL has computed `old_per_token_logps` (the weights move within a generation batch), those are log π_train at
  the weights that sampled, and the advantages are penalised right there. When it has not, the weights stand still
  until the generation batch is used up, and the loss's own forward gives the same numbers: the advantages are replaced
  between that forward and their first use. Either way there is no forward pass that TRL would not make by itself.
"""

from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl.trainer.utils import get_config_model_id

from .config import DCGRPOConfig
from .constraint.advantages import leave_one_out_advantages, total_rewards, zero_std_groups
from .constraint.discrepancy import scored_tokens, token_discrepancy
from .constraint.forms import Constrained, form_of
from .constraint.statistics import BatchStatistics
from .hub.trainer import HubMixin
from .resumable_trainer import ResumableTrainer
from .rollouts.buffer import with_nonempty_completions


logger = get_logger(__name__)

# Losses that are a mean over completions; the others divide by the tokens that enter them.
MEAN_OVER_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")


class DCGRPOTrainer(HubMixin, ResumableTrainer):
    r"""GRPO under a constraint on the discrepancy between the training and the sampling engine (DC-GRPO).

    Takes everything that [`~trl.GRPOTrainer`] takes, with [`DCGRPOConfig`] in place of `GRPOConfig`. The rollouts must
    carry the log-probabilities of the sampled tokens: those of vLLM (`use_vllm=True`), of the in-process replica
    (`deployment_scheme`), or of a `rollout_func` do. With `constraint="none"` the losses are TRL's, bit for bit.

    Args:
        model, reward_funcs, ...: see [`~trl.GRPOTrainer`].
        args (`DCGRPOConfig`, *optional*): by default `DCGRPOConfig` with `deployment_scheme="bf16"`, so that the
            in-process replica samples, or without it where a `rollout_func` does.

    Attributes:
        lagrange_multiplier (`LagrangeMultiplier`): λ; constant unless `constraint="lagrangian"`.
        form (`Form` or `None`): how λ enters the objective, see `dc_trl.constraint.forms`; `None` measures only.
        replica (`Replica` or `None`): the engine that samples, when `deployment_scheme` is set.

    Raises:
        TypeError: `args` is not a `DCGRPOConfig`.
        ValueError: the constraint cannot be measured with these arguments, or they contradict each other.

    Example:

    ```python
    from dc_trl import DCGRPOConfig, DCGRPOTrainer

    trainer = DCGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=reward,
        args=DCGRPOConfig("out", deployment_scheme="fp8"),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names: ClassVar = ["trl", "grpo", "dc-grpo"]

    # TRL's own
    beta: float  # coefficient of the KL term

    def __init__(self, model, reward_funcs=None, args=None, *positional, rollout_func=None, **kwargs):
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            # The constraint needs an engine's log-probabilities. The replica in bf16 is one that every machine has and
            # whose policy is the trained one to rounding; model.generate returns none.
            args = DCGRPOConfig(
                f"{model_id.split('/')[-1]}-DC-GRPO",
                deployment_scheme="bf16" if rollout_func is None else None,
                use_cpu=not torch.accelerator.is_available(),
            )
        self._check_arguments(args, rollout_func)
        if rollout_func is not None:
            rollout_func = with_nonempty_completions(rollout_func)
        # Set before TRL's constructor, which may already call hooks of this class.
        self.form = form_of(args)
        self.lagrange_multiplier = args.multiplier()
        self._statistics = {mode: BatchStatistics(args.batch_reduction) for mode in ("train", "eval")}
        # δ̄ of the present generation batch, from the time it is known to the update of λ at the batch's end.
        self._mean_discrepancy: float | None = None
        # Between two hooks of TRL: rewards of the completions that were scored last, of all processes, NaN where there
        # is none; and the inputs of the loss that is being computed.
        self._rewards: Tensor
        self._loss_inputs: dict[str, Any] | None = None
        self._evaluation_set = ""  # name of the one that is being evaluated, where there are several
        super().__init__(model, reward_funcs, args, *positional, rollout_func=rollout_func, **kwargs)

    @staticmethod
    def _check_arguments(args: DCGRPOConfig, rollout_func: Any) -> None:
        if not isinstance(args, DCGRPOConfig):
            raise TypeError(f"args is a {type(args).__name__}: DCGRPOTrainer needs a DCGRPOConfig.")
        if args.routing_replay and rollout_func is not None:
            raise ValueError(
                "routing_replay=True needs the experts that the engine chose, and a rollout_func does not pass them "
                "on: leave it out, or set routing_replay=False."
            )
        scheme = args.deployment_scheme
        if args.constraint != "none" and not args.use_vllm and scheme is None and rollout_func is None:
            raise ValueError(
                f"constraint={args.constraint!r} needs the rollouts' log-probabilities, and model.generate returns "
                "none: set deployment_scheme (for example 'fp8') to sample from an in-process replica, use_vllm=True, "
                "or constraint='none'."
            )
        if scheme is None or args.use_vllm:
            return
        if rollout_func is not None:
            raise ValueError(
                f"deployment_scheme={scheme!r} samples from the in-process replica and contradicts rollout_func: pass "
                "one of the two."
            )
        sharding = args.distributed_state.distributed_type.value
        if sharding in ("FSDP", "DEEPSPEED"):
            raise ValueError(
                f"deployment_scheme={scheme!r} keeps a whole replica in each process, which {sharding} sharding rules "
                "out: use use_vllm=True, or launch without sharding."
            )

    # --- rollouts and their advantages ------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self._compare_rewards(batch)
        if "sampling_per_token_logps" not in batch:
            if self.form is not None:
                raise ValueError(
                    f"constraint={self.args.constraint!r} needs the rollouts' log-probabilities, and the engine "
                    "returned none (logprobs=None): return them from rollout_func, or set constraint='none'."
                )
        elif "old_per_token_logps" in batch:
            self._constrain(batch, batch["old_per_token_logps"])
            if self.model.training:
                self._report("train")
        return batch

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = total_rewards(rewards_per_func, self.reward_weights)
        return rewards_per_func

    def _compare_rewards(self, batch: dict[str, Any]) -> None:
        """Replaces the advantages of a batch and drops groups from it, as `advantage_estimator` and so on say."""
        args, rewards, training = self.args, self._rewards, self.model.training
        generations = self.num_generations if training else self.num_generations_eval
        count = len(batch["advantages"])
        local = slice(self.accelerator.process_index * count, (self.accelerator.process_index + 1) * count)
        if args.advantage_estimator == "rloo":
            advantages = leave_one_out_advantages(rewards, generations)
            batch["advantages"] = advantages[local]
            table = self._logs["advantages"]  # ends with TRL's own for these completions
            for _ in range(min(len(table), len(advantages))):
                table.pop()
            table.extend(advantages.tolist())
        if args.drop_zero_std_groups and training:
            self._drop_groups(batch, ~zero_std_groups(rewards, generations), local)

    def _drop_groups(self, batch: dict[str, Any], kept: Tensor, local: slice) -> None:
        """Takes completions out of the loss. `kept` is of all processes, boolean; `local` are this one's."""
        for name in ("completion_mask", "tool_mask"):
            if name in batch:
                batch[name] = batch[name] * kept[local].unsqueeze(1)
        batch["num_items_in_batch"] = self.accelerator.gather(_loss_mask(batch).sum()).sum()
        # A mean over completions counts the dropped ones as zeros: those that stay weigh more.
        over_completions = self.args.loss_type in MEAN_OVER_COMPLETIONS
        weight = len(kept) / kept.sum().clamp(min=1) if over_completions else torch.ones((), device=kept.device)
        batch["kept_weight"] = weight * kept.any()

    # --- the constraint on a micro-batch ----------------------------------------------------------------------------

    def _constrain(self, batch: dict[str, Any], train_logps: Tensor) -> None:
        """Measures a batch, penalises its advantages, and counts its tokens; `train_logps` as in `Form`."""
        infer_logps = batch["sampling_per_token_logps"]
        delta = token_discrepancy(train_logps, infer_logps, self.args.discrepancy_measure)
        scored = scored_tokens(_loss_mask(batch), train_logps, infer_logps, delta)
        constrained = self._apply_form(batch, train_logps, scored, batch["advantages"])
        if constrained is not None:
            batch["trajectory_advantages"] = batch["advantages"]
            batch["advantages"] = constrained.advantages.detach()

        if self.model.training and self._completed_passes() > 0:
            return  # the same tokens at the same weights again
        penalty = None if constrained is None else constrained.penalty
        self._statistics["train" if self.model.training else "eval"].add(
            train_logps, infer_logps, scored, delta, penalty
        )

    def _apply_form(
        self, batch: dict[str, Any], train_logps: Tensor, scored: Tensor, advantages: Tensor
    ) -> Constrained | None:
        if self.form is None:
            return None
        infer_logps = batch["sampling_per_token_logps"]
        constrained = self.form(train_logps, infer_logps, scored, advantages, self.lagrange_multiplier.value)
        if constrained.loss is not None:
            batch["constraint_loss"] = constrained.loss
        return constrained

    # --- the loss ---------------------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        # A copy: the buffered inputs come again when num_iterations > 1.
        inputs = dict(inputs)
        weight = inputs["kept_weight"].item() if "kept_weight" in inputs else 1.0
        self._loss_inputs = inputs
        # The weight goes to the terms that are a mean over completions, the policy's by its advantages and KL's by
        # beta, and not to the sum: entropy bonus and auxiliary loss have means of their own.
        beta = self.beta
        self.beta = beta * weight
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs, self.beta = None, beta
        if "constraint_loss" in inputs:
            accumulated = self.current_gradient_accumulation_steps if self.model.training else 1.0
            loss = loss + inputs["constraint_loss"] / accumulated
        return loss if weight > 0 else loss * 0.0  # of a batch that is dropped whole nothing is learned

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        inputs = self._loss_inputs
        if inputs is not None:  # within the loss, which reads the advantages after this forward
            self._constrain_in_loss(inputs, outputs[0])
            if "kept_weight" in inputs:
                inputs["advantages"] = inputs["advantages"] * inputs["kept_weight"]
        return outputs

    def _constrain_in_loss(self, inputs: dict[str, Any], train_logps: Tensor) -> None:
        if "sampling_per_token_logps" not in inputs:
            return
        if "old_per_token_logps" not in inputs:
            self._constrain(inputs, train_logps)
        elif "constraint_loss" in inputs:  # penalised when it was sampled; its loss term wants this forward's gradient
            scored = scored_tokens(_loss_mask(inputs), train_logps, inputs["sampling_per_token_logps"])
            self._apply_form(inputs, train_logps, scored, inputs["trajectory_advantages"])

    def get_gamma_weights(self, advantages, **kwargs):
        # VESPO weighs a trajectory by the sign of its advantage, which a token's penalty must not turn.
        assert self._loss_inputs is not None
        if "trajectory_advantages" in self._loss_inputs:
            advantages = self._loss_inputs["trajectory_advantages"].unsqueeze(1)
        return super().get_gamma_weights(advantages=advantages, **kwargs)

    # --- the generation batch as a whole, and the multiplier --------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        done = self._step % self._micro_batches_per_iteration
        if done == self.args.steps_per_generation % self._micro_batches_per_iteration:
            self._report("train")  # the first pass is over: each token was seen once
        if done == 0 and self._mean_discrepancy is not None:
            if self.args.constraint == "lagrangian":
                self._ascend(self._mean_discrepancy)
            self._mean_discrepancy = None
        return loss

    def _ascend(self, mean_discrepancy: float) -> None:
        """One step of dual ascent (eq. 11)."""
        searching = self.lagrange_multiplier.tolerance is None
        self.lagrange_multiplier.update(mean_discrepancy)
        if searching and (tolerance := self.lagrange_multiplier.tolerance) is not None:
            logger.info(f"discrepancy_tolerance='auto' is {tolerance:.4g} after step {self.state.global_step}.")

    def _report(self, mode: str) -> None:
        """Reduces the statistics over all processes and hands them to TRL's metrics."""
        report = self._statistics[mode].reduce(self.accelerator.gather)
        if report is None:
            return
        if report.tokens == 0:
            logger.warning(
                "No token that enters the loss has log-probabilities from both engines: nothing is measured in this "
                "batch."
            )
            return
        metrics = {f"discrepancy/{name}": value for name, value in report.metrics().items()}
        if self.form is not None:
            value = self.lagrange_multiplier.value
            metrics["lagrangian/lambda"] = value
            if (tolerance := self.lagrange_multiplier.tolerance) is not None:
                metrics["lagrangian/tolerance"] = tolerance
                metrics["lagrangian/violation"] = report.mean_discrepancy - tolerance
            metrics["lagrangian/penalty_mean"] = report.mean_penalty(value)
            metrics["lagrangian/penalized_fraction"] = report.penalized_fraction
        for name, metric in metrics.items():
            self._metrics[mode][name].append(metric)
        if mode == "train":
            self._mean_discrepancy = report.mean_discrepancy

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        # Several evaluation sets, {"easy": …, "hard": …}, come here one by one as "eval_easy", "eval_hard".
        self._evaluation_set = metric_key_prefix.removeprefix("eval").lstrip("_")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def log(self, logs, start_time=None):
        if not self.model.training:
            # Over the whole evaluation: a mean of batch means would weigh the last, shorter batch too much.
            self._report("eval")
            if self._evaluation_set:
                # TRL calls the metrics of every evaluation set by the same names.
                metrics = self._metrics["eval"]
                for name in list(metrics):
                    metrics[f"{self._evaluation_set}_{name}"] = metrics.pop(name)
        super().log(logs, start_time)

    # --- what is started again, saved and resumed -------------------------------------------------------------------

    def _start_again(self):
        super()._start_again()
        self.lagrange_multiplier.load_state_dict(self.args.multiplier().state_dict())
        self._statistics["train"].clear()
        self._mean_discrepancy = None

    def _iteration_state(self):
        return {
            "lagrange_multiplier": self.lagrange_multiplier.state_dict(),
            "batch_discrepancy": self._mean_discrepancy,
        }

    def _load_iteration_state(self, state, within_batch):
        self.lagrange_multiplier.load_state_dict(state["lagrange_multiplier"])
        if within_batch:
            self._mean_discrepancy = state["batch_discrepancy"]


def _loss_mask(batch: dict[str, Any]) -> Tensor:
    """Completion tokens that enter the loss: not those that a tool has written."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
