"""`DCGRPOTrainer`: TRL's GRPO trainer with the discrepancy measured token by token, and constrained.

TRL's hooks are here under TRL's names, in the order of a step. Each calls an object that the trainer holds: the engine
that samples, the constraint, the parts that settings ask for, the run with its checkpoints. What DC-GRPO does within a
step is the first part, `parts/two_engines.py`. Nothing of TRL is copied; tests/hooks.md lists the private names, with
the reason for each.

TRL's `profiling_context` counts nested times twice, so a clock of our own is switched here. A GPU's remaining work is
charged to the part that waits for it: the clock waits for the device where the host is about to wait anyway, at the
end of a micro-batch, and before the statistics of a generation batch are reduced.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from accelerate import DistributedType
from accelerate.logging import get_logger
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from .config import DCGRPOConfig
from .constraint.constraint import Constraint
from .files import written_beside
from .gate.before_loading import require_runnable
from .gate.loaded_policy import Limits, require_fit, require_read, within_server
from .grading.totals import finite_totals
from .parts import parts_of
from .parts.part import Parts, Rollout, Scores
from .processes import on_main_process
from .quantization.policy import unwrapped
from .records.clock import EVALUATION, OTHER, PREFIX, PartsClock
from .records.runs import DEPLOYMENT_FOLDER, Run
from .records.verdict import NOT_MEASURED, first_batch, verdict_of
from .run.checkpoints import Checkpoints
from .run.history import HistoryCallback
from .run.hub import CARD_FILE, HubClient, complete_card, hub_dataset, without_token
from .run.progress import BRIEF
from .run.resuming import given_rates, load_saved_weights, own_adapters, position_in_data
from .run.training_run import TrainingRun
from .sampling.deployed_policy import greedy_completion_ids, greedy_completions, weighted_rewards
from .sampling.empty_completions import checked_rollouts
from .sampling.engines import build_sampler
from .settings.paths import shipped


if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from peft import PeftConfig, PeftModel
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import Sampler as DataSampler
    from transformers import (
        BitsAndBytesConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
        TrainerCallback,
    )

    from .constraint.lagrangian import LagrangeMultiplier
    from .grading.checked_reward import RewardFunction
    from .run.deployment import Deployment
    from .sampling.replica import Replica

    Reward: TypeAlias = str | PreTrainedModel | RewardFunction

logger = get_logger(__name__)


class DCGRPOTrainer(GRPOTrainer):
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
        constraint (`Constraint`): form, correction and statistics of the discrepancy, and λ.
        sampler (`Sampler`): the engine that samples, whichever it is, and the schedule of its weights.
        parts (`Parts`): what the settings ask for beside this, see `dc_trl.parts`; one of your own may be added.
        checkpoints (`Checkpoints`): saves the run and resumes it.
        clock (`PartsClock`): measures the parts of the time of `train`, on from those of a checkpoint.
        exports_at_end (`bool`): whether the present training exports the policy when it ends; `train` sets it each
            time. A callback that stops a run whose result should not be served clears it.

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

    _tag_names: ClassVar = ["trl", "grpo", "dc-grpo"]

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
        model = shipped(model) if isinstance(model, str) else model
        prompts = require_runnable(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        # Set before TRL's constructor, which may already call hooks of this class.
        self.clock = PartsClock()
        self.constraint = Constraint(args)
        self.parts = Parts()
        self._limits: Limits | None = None  # what the policy can read, once it is loaded
        # What is known of the rows that are scored: columns of a generation batch, or the micro-batch of a loss.
        self._inputs: dict[str, Any] = {}
        self._first_batch_seen = False  # in the present call of `train`
        self._train_sampler: DataSampler | None = None  # of the present training, unless its data set is a stream
        callbacks, self._own_history = list(callbacks or ()), None
        if args.export_run and not any(map(_keeps_history, callbacks)):
            self._own_history = HistoryCallback()
            callbacks.insert(0, self._own_history)  # a user's callback finds the files of the same event written
        # TRL would build an engine without a deployment scheme. Ours is built below, when the rest exists.
        with args.having(acts=True, use_vllm=False):
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
                rollout_func=None if rollout_func is None else checked_rollouts(rollout_func),
                environment_factory=environment_factory,
            )
        self._limits, first = require_fit(self, prompts)
        self.use_vllm = args.use_vllm
        self.sampler = build_sampler(self)
        if self._limits is not None and args.use_vllm and args.vllm_mode == "server":
            self._limits = within_server(args, self._limits, self.vllm_generation.context, first)
        self.parts.extend(parts_of(self))
        self.checkpoints = Checkpoints(self)
        self.run = TrainingRun(self)
        self.exports_at_end = args.exports_deployment
        if not args.use_vllm and args.deployment_scheme is None and rollout_func is None:
            logger.warning(f"The mismatch will not be measured: {NOT_MEASURED}")

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.accelerator.distributed_type == DistributedType.FSDP:  # FSDP2: version 1 has another class
            plugin = self.accelerator.state.fsdp_plugin
            if isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
                # It would round what the model returns, TRL's float32 log-probabilities among it, to bfloat16.
                plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)

    def add_callback(self, callback):
        """Add a callback; a `HistoryCallback` replaces the trainer's own, and transformers' printed logs are brief."""
        if self._own_history is not None and _keeps_history(callback):
            self.remove_callback(HistoryCallback)
            self._own_history = None
        super().add_callback(BRIEF.get(callback, callback) if isinstance(callback, type) else callback)

    # Attributes of TRL
    _buffered_inputs: Any

    # --- what it holds ----------------------------------------------------------------------------------------------

    @property
    def lagrange_multiplier(self) -> LagrangeMultiplier:
        """λ; constant with `constraint="static"`."""
        return self.constraint.multiplier

    @property
    def replica(self) -> Replica | None:
        """The in-process engine that samples, if `deployment_scheme` is set without vLLM."""
        return self.sampler.replica

    @property
    def micro_batches_per_generation(self) -> int:
        """The number of micro-batches for which one generation batch is used, in all of its iterations."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def mode(self) -> str:
        """Either `"train"` or `"eval"`, as TRL names the mode of the model."""
        return "train" if self.model.training else "eval"

    def add_metric(self, name: str, value: float, mode: str | None = None) -> None:
        """Add a value to a metric, of which the mean is logged; by default in the present mode."""
        self._metrics[mode or self.mode][name].append(value)

    # --- a generation batch: completions, rewards, advantages -------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return super().get_batch_samples(self.sampler.look_ahead(epoch_iterator, num_batches), num_batches, device)

    def _prepare_inputs(self, generation_batch):
        with self.clock.part(OTHER):
            before = self._buffered_inputs
            inputs = super()._prepare_inputs(generation_batch)
            if not self.model.training:
                return self.parts.through("slices", [inputs])[0]
            if self._buffered_inputs is not before:
                self._buffered_inputs = self.parts.through("slices", self._buffered_inputs)
            return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs):
        try:
            batch = super()._generate_and_score_completions(inputs) | self._inputs
        finally:
            self._inputs = {}
        for change in self.parts.at("batch"):
            change(batch)
        if "old_per_token_logps" in batch:
            for change in self.parts.at("compare"):
                change(batch, batch["old_per_token_logps"])
        return batch

    def _generate(self, prompts):
        with self.clock.part("generation"):
            for act in self.parts.at("prompts"):
                act(prompts)
            prompt_ids, completion_ids, mask, completions, logprobs, *others = super()._generate(prompts)
            rollout = Rollout(prompt_ids, completion_ids, logprobs, mask)
            for read in self.parts.at("rollout"):
                read(rollout)
            self._inputs = rollout.columns
            return prompt_ids, completion_ids, rollout.mask, completions, rollout.logprobs, *others

    def _tokenize_prompts(self, prompts):
        if self._limits is not None and self.environment_factories is None:
            require_read(self, prompts, plain=False)
        tokenized = super()._tokenize_prompts(prompts)
        if self._limits is not None:
            self._limits.require(tokenized[0], prompts)
        return tokenized

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        of_trl = partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
        return self.parts.around("turn", of_trl, prompt_ids)()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self.clock.part("reward"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        totals = finite_totals(rewards, self.reward_weights, self.reward_funcs, self.reward_func_names)
        objectives = totals.unsqueeze(0)
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            objectives = rewards.T  # equal sums of different rewards have advantages
        for read in self.parts.at("rewards"):
            read(objectives)
        if self.model.training and not self._first_batch_seen:
            self._first_batch_seen = True
            clipped = self._metrics["train"]["completions/clipped_ratio"][-1]
            warning = first_batch(objectives.tolist(), self.num_generations, clipped, self.max_completion_length)
            if warning is not None:
                logger.warning(warning)
        return rewards

    # --- the loss of a micro-batch ----------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        compute = self.parts.around("loss", partial(super()._compute_loss, model))
        # A copy, because the buffered inputs are used again when num_iterations > 1.
        with self._scoring(dict(inputs)):
            return compute(self._inputs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        inputs, tokens = self._inputs, (input_ids, attention_mask, logits_to_keep)
        with self.clock.part("logps", within=OTHER):  # and not within the loss, whose forward is the loss's
            score = partial(super()._get_per_token_logps_and_entropies, model)
            if batch_size is not None:  # of a whole generation batch
                options["batch_size"] = batch_size
            scores = self.parts.around("forward", score, model, inputs)(*tokens, **options)
        if "advantages" in inputs:  # which the loss reads after this forward
            if "old_per_token_logps" not in inputs:
                for change in self.parts.at("compare"):
                    change(inputs, scores[0])
            scores = self.parts.through("scored", scores, inputs, *tokens)
        return scores

    @contextmanager
    def _scoring(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Let the forwards within the context read this of their rows."""
        before, self._inputs = self._inputs, inputs
        try:
            yield
        finally:
            self._inputs = before

    def score_rows(self, model: Any, inputs: dict[str, Any], **options: Any) -> Scores:
        """Return the scores of the completions of `inputs`, prompts and completions apart; see `Part.forward`."""
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
        tokens = (ids, mask, inputs["completion_ids"].shape[1])
        with self._scoring(inputs):
            return self._get_per_token_logps_and_entropies(model, *tokens, **options)

    def score(self, inputs: dict[str, Any], rows: int | None = None) -> Tensor:
        """Return log π of the completion tokens of a micro-batch as the loss takes it, shape (B, T), nats.

        Args:
            inputs: micro-batch; the forward reads what the loss's reads of it.
            rows: of a forward; all by default.
        """
        # It is not the loss's forward, and what a forward has left of other weights is not what this one finds.
        inputs = {name: value for name, value in inputs.items() if name not in ("advantages", "compared_logps")}
        names = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
        options = {name: inputs[name] for name in names if name in inputs}
        scores = self.score_rows(self.model, inputs, batch_size=rows, **options)
        return inputs.get("compared_logps", scores[0])

    # --- the end of a micro-batch, of a pass over the generation batch, and of an iteration -------------------------

    def training_step(self, model, inputs, num_items_in_batch):
        with self.clock.part("loss"):
            try:
                loss = super().training_step(model, inputs, num_items_in_batch)
            finally:
                for act in self.parts.at("after_backward"):
                    act()
            self.wait_for_device("loss")
        if self.accelerator.sync_gradients:  # gradients are clipped, then the optimizer steps
            self.clock.switch("optimizer")
        for act in self.parts.at("trained"):
            act(self._step % self.micro_batches_per_generation)
        return loss

    def wait_for_device(self, part: str) -> None:
        """Charge a part with the remaining work of the device."""
        if self.accelerator.device.type != "cpu":
            with self.clock.part(part):
                torch.accelerator.synchronize()

    def evaluate(self, *args, **kwargs):
        with self.clock.part(EVALUATION):
            return super().evaluate(*args, **kwargs)

    def log(self, logs, start_time=None):
        if "train_runtime" in logs:  # the last log; after an evaluation TRL would lose the training's last metrics
            self.model.train()
        if self.model.training:
            logs |= {f"{PREFIX}{part}": seconds for part, seconds in self.clock.lap().items()}
        else:
            for act in self.parts.at("evaluated"):
                act()
            # TRL evaluates several sets, {"easy": …, "hard": …}, one by one with the prefixes "eval_easy" and
            # "eval_hard", and calls the metrics of all of them by the same names.
            runtime = next((name for name in logs if name.endswith("_runtime")), "eval_runtime")
            if of_set := runtime.removesuffix("_runtime").removeprefix("eval").lstrip("_"):
                metrics = self._metrics["eval"]
                for name in list(metrics):
                    metrics[f"{of_set}_{name}"] = metrics.pop(name)
        with self.clock.part("metrics"):
            super().log(logs, start_time)

    # --- a training: begin, save, resume, end -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`~transformers.Trainer.train`] does; a second call starts again with the present weights.

        λ starts at `lambda_init` again, or from its value in the checkpoint of `resume_from_checkpoint`. `True`
        selects the newest complete checkpoint in `output_dir`; `"auto"` does too, but the run starts from the
        beginning if there is none. A run whose steps are all done is not trained further: its weights are loaded, what
        is still missing at its end (an evaluation, the deployment) is made, and the result is returned. At the end a
        verdict is printed: whether the policy learned, and what the mismatch means.

        The directory is locked during training. If an error of a reward function, callback or server or Ctrl-C ends
        training early, the last step that ended is saved before the error is raised, with a note that says how to
        resume.

        Raises:
            ValueError: the checkpoint is incomplete, or `output_dir` is in use by another process or not writable.
            DivergedError: weights, or the gradients of several steps in a row, are not finite.
            ServerError: the server cannot do what training needs; the message says how to resume.
            RunInterrupted: a signal ended the run, with a checkpoint if a step had ended; only if `StopSignals` is
                among the callbacks, as in `dc-trl train`.
        """
        self.clock.start()
        if self._buffered_inputs is not None:  # this object has trained before, if only a part of a micro-batch
            self._start_again()
        try:
            with self.run.training(resume_from_checkpoint) as checkpoint:
                self.exports_at_end = self.args.exports_deployment
                if self.exports_at_end:
                    on_main_process(self.deployment.require_exportable)
                output = super().train(checkpoint, *args, **kwargs)
                self.checkpoints.soundness.require_finite()
                if self.args.load_best_model_at_end:
                    self.sampler.start_again()  # vLLM still holds the last weights
                if self.exports_at_end:
                    self.deployment.export(self.args.output_dir)
                verdict = verdict_of(Run("", self.state.log_history))
                self.accelerator.print(*verdict.lines, sep="\n")
                return output
        finally:
            self.clock.stop()

    def _start_again(self) -> None:
        """Reset everything that an earlier training of this object left, except the weights."""
        self._step, self._buffered_inputs, self._first_batch_seen = 0, None, False
        self._metrics["train"].clear()
        self.sampler.start_again()
        self.constraint.start_again()

    def set_initial_training_values(self, args, dataloader):
        epochs, *others, steps = super().set_initial_training_values(args, dataloader)
        return (self.run.epochs(epochs, steps), *others, steps)

    def _get_grad_norm(self, model, grad_norm=None):
        return self.checkpoints.soundness.checked(super()._get_grad_norm(model, grad_norm=grad_norm), model)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self.control.should_save &= self.checkpoints.soundness.may_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.checkpoints.end_step()

    def _save_checkpoint(self, model, trial):
        with self.clock.part("saving"):
            self.checkpoints.write(partial(super()._save_checkpoint, model, trial), self.checkpoint_folder(trial))

    def checkpoint_folder(self, trial: Any = None) -> str:
        """Return the folder of the checkpoint of the present step."""
        return os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _save(self, output_dir=None, state_dict=None):
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        # The arguments are pickled with the model: without a token.
        with without_token(self.args), written_beside(folder) as beside:
            super()._save(str(beside), state_dict)
            (beside / CARD_FILE).unlink(missing_ok=True)  # PEFT's, in place of which a run has its own

    def _load_optimizer_and_scheduler(self, checkpoint):
        with given_rates(self.lr_scheduler, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.checkpoints.load(checkpoint)

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        return position_in_data(self, self._train_sampler, epochs, batches, resume_from_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        policy = unwrapped(self.accelerator, self.model if model is None else model)
        with own_adapters(policy, resume_from_checkpoint):
            if not load_saved_weights(self, policy, resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        policy = unwrapped(self.accelerator, self.model)
        if not load_saved_weights(self, policy, self.state.best_model_checkpoint):
            super()._load_best_model()
        self.checkpoints.best_is_loaded()

    # --- the policy as it is deployed -------------------------------------------------------------------------------

    def deployed_completion_ids(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Return greedy completions of the policy as it is deployed, by replica or vLLM, with the present weights.

        Args:
            prompt_ids: token ids of the prompts; the same number of prompts in every process.

        Returns:
            Token ids of one completion for each prompt, at most `max_completion_length`.

        Raises:
            ValueError: there is no engine (neither `deployment_scheme` nor `use_vllm` is set).
        """
        return greedy_completion_ids(self, prompt_ids)

    def deployed_completions(self, prompts: list) -> list:
        """Return greedy completions of the policy as it is deployed, plain or conversational like the prompts.

        Args:
            prompts: plain (`str`) or conversational (list of messages) prompts; the same number in every process.

        Raises:
            ValueError: the trainer has tools, or see `deployed_completion_ids`.
        """
        return greedy_completions(self, prompts)[0]

    def deployed_rewards(self, rows: list[dict[str, Any]]) -> list[float | None]:
        """Return the run's rewards, weighted and summed, of greedy completions of the policy as it is deployed.

        Args:
            rows: rows of a data set with `prompt` and the columns of the rewards; the same number in every process.

        Returns:
            The reward of each row, or None if no function scored it.

        Raises:
            TypeError, ValueError: see `deployed_completions`, or a reward function returned something else.
        """
        prompts = [row["prompt"] for row in rows]
        rewards = super()._calculate_rewards(rows, prompts, *greedy_completions(self, prompts))
        # They are no rollouts, of which TRL logs what reward functions ask it to.
        self._pending_extra_logs.clear()
        self._pending_metrics.clear()
        return weighted_rewards(self, rewards)

    @cached_property
    def deployment(self) -> Deployment:
        """Writes the policy as it is deployed."""
        from .run.deployment import Deployment  # imports compressed-tensors, which takes 0.15 s

        return Deployment(self)

    def save_deployment(self, directory: str | os.PathLike[str]) -> None:
        """Write the policy as it is deployed, in `deployment_scheme` or bf16; see `CheckpointWriter.write`.

        With `lora_deployment="adapter"` the directory has the base, and the adapter in `adapter/`. A directory that
        holds no model is a user's own, and is renamed. If the file system refuses, the previous contents are unharmed.
        Every process must call it.
        """
        self.deployment.save(directory)

    def save_model(self, output_dir=None, _internal_call=False):
        """Save the model as [`~transformers.Trainer.save_model`] does, and the deployable checkpoint beside it.

        The checkpoint is written to `deployment/` in the same directory if `export_run` and a served
        `deployment_scheme` are set. A folder of that name without a model is kept as `deployment.1/` and so on.
        transformers' own calls for each `checkpoint-N` export nothing, because each would cost the disk
        space of a whole model; `DeploymentCheckpointCallback` exports them on request.
        If the file system refuses, the previous contents are unharmed.
        """
        if self.args.exports_deployment and not _internal_call:
            self.deployment.export(self.args.output_dir if output_dir is None else output_dir)
        super().save_model(output_dir, _internal_call)

    # --- the Hub ----------------------------------------------------------------------------------------------------

    @cached_property
    def _hub(self) -> HubClient:
        return HubClient(self.args)

    def init_hf_repo(self, *args, **kwargs):
        with self._hub.pushing():
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args, export=True, **kwargs):
        """Push the run: model, deployment checkpoint, history of λ, figure and model card; see docs/after_training.md.

        It takes and returns what [`~transformers.Trainer.push_to_hub`] does; `dataset_name` and `tags` go to the card.
        Every process has to call it.

        The deployment checkpoint is first written from the present weights, unless `export` is False.

        Raises:
            HubError: the Hub refused or could not be reached. Calling this again sends what is missing.
        """
        if export and self.args.deployment_scheme is not None:
            self.save_deployment(Path(self.args.output_dir, DEPLOYMENT_FOLDER))
        with self._hub.pushing():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        with self._hub.pushing(deployment=False):
            self.checkpoints.make_whole(checkpoint_folder)
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write README.md into the output directory: TRL's card, with what the run says of its constraint."""
        if self.is_world_process_zero():
            card = Path(self.args.output_dir, CARD_FILE)
            card.unlink(missing_ok=True)  # a link is not followed
            super().create_model_card(model_name or card.absolute().parent.name, hub_dataset(dataset_name), tags)
            complete_card(self)


def _keeps_history(callback: Any) -> bool:
    return callback is HistoryCallback or isinstance(callback, HistoryCallback)  # transformers instantiates classes
