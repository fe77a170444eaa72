"""`HookedTrainer`: TRL's GRPO trainer, whose private hooks and attributes have public names here.

This is the one module that names private members of `trl.GRPOTrainer` and `transformers.Trainer`. Each private hook
calls one method of [`HookedTrainer`], which subclasses extend with `super()`; private attributes are properties. When
TRL moves one of them, this file changes and nothing else. docs/hooks.md is its table, with the reason for each hook,
and tests/test_hooks.py compares the table with the installed releases.

The hooks are also where the time is measured, since TRL's `profiling_context` counts nested times twice. A GPU's
remaining work is charged to the part that waits for it, so the clock waits for the device where the host is about to
wait anyway: at the end of a micro-batch, and before the statistics of a generation batch are reduced.
"""

from __future__ import annotations

import inspect
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from accelerate.logging import get_logger
from accelerate.scheduler import AcceleratedScheduler
from datasets import IterableDataset
from peft import PeftModel
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from .files import read_object
from .quantization.policy import unwrapped
from .records.clock import EVALUATION, OTHER, PREFIX, PartsClock, timed
from .records.runs import TRAINER_STATE_FILE


logger = get_logger(__name__)

# Several processes on a CPU: transformers loads the optimizer to accelerate's "cpu:0", unknown to torch.load.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)

# Log-probabilities and entropies, both of shape (rows, T), and the auxiliary loss.
Scores: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
# Token ids of each completion of one turn, and their log-probabilities, if the engine returns any.
Completions: TypeAlias = tuple[list[list[int]], list[list[float]] | None]


class HookedTrainer(GRPOTrainer):
    """TRL's GRPO trainer with a public name for each private hook; see [`DCGRPOTrainer`].

    Attributes:
        parts_clock (`PartsClock`): measures the parts of the time of `train`, on from those of a checkpoint.
        training_seconds (`float`): the clock's seconds, without work that was lost when a run was killed.
    """

    _tag_names: ClassVar = ["trl", "grpo", "dc-grpo"]

    # Attributes of TRL
    _step: int
    _buffered_inputs: Any
    _metrics: dict[str, defaultdict[str, list[float]]]
    _last_loaded_step: int
    reward_funcs: list[Any]

    def __init__(self, *args: Any, **kwargs: Any):
        # Set before TRL's constructor, which may already call hooks of this class.
        self.parts_clock = PartsClock()
        self._train_sampler: Sampler | None = None  # sampler of the present training, unless its data set is a stream
        super().__init__(*args, **kwargs)

    # --- attributes of TRL ------------------------------------------------------------------------------------------

    @property
    def micro_batches_done(self) -> int:
        """The number of micro-batches on which this object has trained; its remainder is the position in a batch."""
        return self._step

    @micro_batches_done.setter
    def micro_batches_done(self, count: int) -> None:
        self._step = count

    @property
    def generation_batch(self) -> Any:
        """The generation batch in slices, one for each micro-batch, or None."""
        return self._buffered_inputs

    @generation_batch.setter
    def generation_batch(self, slices: Any) -> None:
        self._buffered_inputs = slices

    @property
    def training_seconds(self) -> float:
        return sum(self.parts_clock.seconds().values())

    @property
    def mode(self) -> str:
        """Either `"train"` or `"eval"`, as TRL names the mode of the model."""
        return "train" if self.model.training else "eval"

    def metrics_since_log(self, mode: str) -> dict[str, list[float]]:
        """Return the metrics of a mode since its last log: name → values, of which the mean is logged."""
        return self._metrics[mode]

    def add_metric(self, name: str, value: float, mode: str | None = None) -> None:
        """Add a value to a metric, of which the mean is logged; by default in the present mode."""
        self._metrics[mode or self.mode][name].append(value)

    def add_column(self, name: str, values: list[Any]) -> None:
        """Add values to a column of the table of completions, one for each completion of the present batch."""
        self._pending_extra_logs[name].extend(values)

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, also where the processing class is a multimodal processor."""
        return self._tokenizer

    @property
    def scores_when_sampled(self) -> bool:
        """Whether TRL scores a generation batch as it is sampled (`old_per_token_logps`), first with the policy."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        return not aligned or (self.use_vllm and self.args.vllm_importance_sampling_correction)

    def scored_models(self) -> list[Any]:
        """Return the models that score tokens, the policy and any reference model of its own, without wrappers."""
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        return [unwrapped(self.accelerator, model) for model in models]

    def skip_weight_sync(self) -> None:
        """Keep TRL from loading weights into vLLM at this step, because the engine has those that should sample."""
        self._last_loaded_step = self.state.global_step

    def checkpoint_folder(self, trial: Any = None) -> str:
        """Return the folder of the checkpoint of the present step."""
        return os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    # --- rollouts ---------------------------------------------------------------------------------------------------

    @timed(OTHER)
    def _prepare_inputs(self, generation_batch):
        return self.next_micro_batch(generation_batch)

    def next_micro_batch(self, generation_batch: Any) -> dict[str, Any]:
        """Return the inputs of the next loss; at the beginning of a generation batch, sample and score it."""
        return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs):
        return self.sample_and_score(inputs)

    def sample_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a generation batch of rows of the data set: tokens, masks, advantages, and log-probabilities."""
        return super()._generate_and_score_completions(inputs)

    @timed("generation")
    def _generate(self, prompts):
        self.begin_rollout(prompts)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *others = super()._generate(prompts)
        mask, logprobs = self.end_rollout(prompt_ids, completion_ids, tool_mask, logprobs)
        return prompt_ids, completion_ids, mask, completions, logprobs, *others

    def begin_rollout(self, prompts: list) -> None:
        """Prepare the engine for the prompts of a batch."""

    def end_rollout(
        self,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        tool_mask: list[list[int]] | None,
        logprobs: list[list[float]] | None,
    ) -> tuple[list[list[int]] | None, list[list[float]] | None]:
        """Receive the completions of all turns.

        Returns:
            The mask of the tokens that the policy wrote (None for all), and the log-probabilities that TRL gets.
        """
        return tool_mask, logprobs

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        turn = super()._generate_single_turn
        return self.sample_turn(prompt_ids, lambda: turn(prompt_ids, *args, **kwargs))

    def sample_turn(self, prompt_ids: list[list[int]], sample: Callable[[], Completions]) -> Completions:
        """Return one turn of completions of prompts; `sample` returns those of TRL's engine."""
        return sample()

    def _tokenize_prompts(self, prompts):
        return self.tokenize(prompts)

    def tokenize(self, prompts: list) -> tuple:
        """Return the token ids of plain or conversational prompts, their images, and the inputs of a vision model."""
        return super()._tokenize_prompts(prompts)

    @timed("reward")
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.take_rewards(rewards)
        return rewards

    def take_rewards(self, rewards: Tensor) -> None:
        """Receive the rewards of the completions of all processes, shape (N, functions), NaN where there is none."""

    def score_unrecorded(self, rows: list, prompts: list, completions: list, completion_ids: list) -> Tensor:
        """Return the run's rewards of completions that are no rollouts, of which TRL logs nothing; shape (N, F)."""
        rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids)
        # Only what reward functions log of rollouts is kept.
        self._pending_extra_logs.clear()
        self._pending_metrics.clear()
        return rewards

    # --- the loss ---------------------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        return self.policy_loss(model, inputs)

    def policy_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of one forward."""
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self.parts_clock.present != OTHER:  # within the loss, or within a form with a forward of its own
            return self.score_tokens(model, *args, **kwargs)
        with self.parts_clock.part("logps"):
            return self.score_tokens(model, *args, **kwargs)

    def score_tokens(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Scores:
        """Return the log-probabilities of completions, in nats and at the sampling temperature, and their entropies.

        Args:
            model: policy or reference model, perhaps wrapped.
            input_ids, attention_mask: prompts and completions, shape (rows, P + T).
            logits_to_keep: T.
            batch_size: number of rows of a forward; None for all of them, as in the loss.
            **options: whether entropies and auxiliary loss are computed, and the inputs of a vision model.
        """
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **options
        )

    def score_inputs(self, inputs: dict[str, Any], *tokens: Any) -> Scores:
        """Score tokens of a batch as `score_tokens` does, with all that the forward reads of the batch beside them."""
        names = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
        others = {name: inputs[name] for name in names if name in inputs}
        return self._get_per_token_logps_and_entropies(self.model, *tokens, **others)

    def training_step(self, model, inputs, num_items_in_batch):
        with self.parts_clock.part("loss"):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.wait_for_device("loss")
        if self.accelerator.sync_gradients:  # gradients are clipped, then the optimizer steps
            self.parts_clock.switch("optimizer")
        return loss

    def wait_for_device(self, part: str) -> None:
        """Charge a part with the remaining work of the device."""
        if self.accelerator.device.type != "cpu":
            with self.parts_clock.part(part):
                torch.accelerator.synchronize()

    # --- evaluations and logs ---------------------------------------------------------------------------------------

    @timed(EVALUATION)
    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def log(self, logs, start_time=None):
        if self.model.training:
            logs |= {f"{PREFIX}{part}": seconds for part, seconds in self.parts_clock.lap().items()}
        with self.parts_clock.part("metrics"):
            super().log(logs, start_time)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @timed("saving")
    def _save_checkpoint(self, model, trial):
        self.write_checkpoint(trial)

    def write_checkpoint(self, trial: Any = None) -> None:
        """Write the checkpoint of the present step, push it if the Hub gets checkpoints, and remove old ones."""
        super()._save_checkpoint(self.model, trial)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the present step, as training does. Every process must call it."""
        self._save_checkpoint(self.model, trial=None)

    def _push_from_checkpoint(self, checkpoint_folder):
        self.push_checkpoint(checkpoint_folder)

    def push_checkpoint(self, folder: str) -> None:
        """Push a checkpoint that `write_checkpoint` has written."""
        super()._push_from_checkpoint(folder)

    def _save(self, output_dir=None, state_dict=None):
        self.write_model(self.args.output_dir if output_dir is None else output_dir, state_dict)

    def write_model(self, output_dir: str, state_dict: dict[str, Tensor] | None) -> None:
        """Write model, tokenizer and arguments into a directory."""
        super()._save(output_dir, state_dict)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.end_step()

    def end_step(self) -> None:
        """Act when an optimizer step has ended, and was logged, evaluated and saved where that is due."""

    # --- resuming ---------------------------------------------------------------------------------------------------

    def iteration_state(self) -> dict[str, Any]:
        """Return the state with which a run resumes beside weights and optimizer, as JSON values."""
        return {"seconds": self.parts_clock.seconds()}

    def load_iteration_state(self, state: dict[str, Any], within_batch: bool) -> None:
        """Restore the state of `iteration_state`; `within_batch` says whether the generation batch is resumed too."""
        self.parts_clock.carry(state["seconds"])

    def _load_optimizer_and_scheduler(self, checkpoint):
        rates = base_rates(self.lr_scheduler)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            use_base_rates(self.lr_scheduler, rates)
            self.load_state(checkpoint)

    def load_state(self, checkpoint: str) -> None:
        """Continue from the state of a checkpoint, after the optimizer has been loaded."""

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None and isinstance(self.train_dataset, IterableDataset):
            # transformers assumes that an epoch of a stream has max_steps steps, so a run that has read the whole
            # stream would resume from its beginning. The saved epoch is the number of passes plus the share of
            # max_steps in the last one.
            saved = read_object(Path(resume_from_checkpoint, TRAINER_STATE_FILE))
            epochs = max(0, math.ceil(saved["epoch"]) - 1)
            if not self.args.ignore_data_skip:
                steps = round((saved["epoch"] - epochs) * saved["max_steps"])
                batches = steps * self.args.gradient_accumulation_steps
        elif resume_from_checkpoint is not None:
            assert self._train_sampler is not None
            for _ in range(epochs):  # TRL's sampler draws each epoch's order after the last one's
                next(iter(self._train_sampler), None)
        return epochs, batches

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        policy = unwrapped(self.accelerator, self.model if model is None else model)
        if not load_saved_weights(self, policy, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if isinstance(policy, PeftModel) and len(policy.peft_config) > 1:
            # With a reference adapter, transformers loads only the adapters in separate folders, and the trained
            # adapter is not in one.
            policy.load_adapter(resume_from_checkpoint, policy.active_adapter, is_trainable=True)

    def _load_best_model(self):
        policy = unwrapped(self.accelerator, self.model)
        if not load_saved_weights(self, policy, self.state.best_model_checkpoint):
            super()._load_best_model()


def load_saved_weights(trainer: Trainer, policy: Any, checkpoint: str) -> bool:
    """Load a checkpoint's weights into a policy that is neither sharded nor adapted; return whether it is such a one.

    transformers saves them under the names of published checkpoints, which for mixtures of experts and models with
    images differ from those in memory. It looks there for the latter, and without a match continues with the weights
    that it has (its issue 48805, open with 5.17). `from_pretrained` translates the names.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or isinstance(policy, PeftModel):
        return False
    policy.load_state_dict(type(policy).from_pretrained(checkpoint, dtype="auto").state_dict())
    return True


def base_rates(scheduler: LRScheduler | AcceleratedScheduler) -> list[float | Tensor]:
    """Return the learning rate of each parameter group before it is scheduled; none where DeepSpeed schedules."""
    inner = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    has_rates = isinstance(inner, LRScheduler) and not isinstance(inner, ReduceLROnPlateau)
    return list(inner.base_lrs) if has_rates else []


def use_base_rates(scheduler: LRScheduler | AcceleratedScheduler, rates: list[float | Tensor]) -> None:
    """Schedule these rates, of `base_rates` before a checkpoint was loaded, in place of those that it has brought.

    PyTorch's schedulers and optimizers restore the rates of the checkpoint, so that a lower `learning_rate`, the first
    remedy for a run that went wrong, would have no effect.
    """
    inner = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    saved = base_rates(inner)
    if saved == rates:
        return
    for group, old, new in zip(inner.optimizer.param_groups, saved, rates, strict=True):
        group["lr"] = group["lr"] / old * new if old else new
        group["initial_lr"] = new
    inner.base_lrs = rates
    inner._last_lr = [group["lr"] for group in inner.optimizer.param_groups]  # what is logged
    logger.warning(f"learning_rate={rates[0]:g} from here on: the checkpoint was trained at {saved[0]:g}.")


def generation_batch_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """Return the generation batch that a trainer of TRL is using, in one part for each micro-batch."""
    return trainer._buffered_inputs


def add_metrics(trainer: GRPOTrainer, metrics: dict[str, float]) -> None:
    """Add values to the training metrics of a trainer of TRL, of which it logs the means."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)
