"""`AsyncDCGRPOTrainer`: TRL's asynchronous GRPO whose lag is measured, constrained and masked.

AsyncGRPO's loss multiplies each advantage by r = π_train/π_inf, the ratio of the trainer's present weights to the
weights that sampled, and clips it. None of that loss is copied here:

- *log π_train* is read from the loss's own forward by a hook on the model.
- *The constraint* is a term of the loss: λ times the mean of r·penalty. A penalised advantage Ã = Â − λ·penalty adds
  the same term to the loss, but for the clip: it stops updates that move a token away from the sampler.
- *A mask* removes tokens from a loss that has already been computed. The loss of a token is proportional to its
  advantage, so it equals the advantage times the loss's gradient with respect to it. That product is subtracted, with
  its gradient, for the masked tokens.

An iteration is one optimizer step; its samples may have different ages. TRL's queue has the version of the weights
that began each group of samples, and its batches do not: they get it here, as the optimizer step of these weights.
What these weights gave the samples, log p_s, takes a forward for each version in a micro-batch, with the version in
place. The versions that `max_staleness` lets sample are kept for it in the host's memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import psutil
import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ..constraint.constraint import Constraint
from ..files import read_object, write_json
from ..gate.before_loading import require_startable
from ..gate.loaded_policy import limits_of, require_same_logits, require_trainable
from ..grading.checked_reward import checked_reward
from ..processes import on_main_process
from ..quantization.policy import base_model
from ..run.manifest import STATE_FILE, resumable_checkpoint, write_manifest
from ..run.resuming import given_rates, load_saved_weights
from ..run.soundness import Soundness
from ..sampled_tokens import SampledTokens, bounded_log_ratio
from ..sampling.versions import SamplerWeights
from ..settings.distribution import sharding_of
from .async_config import AsyncDCGRPOConfig


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PreTrainedTokenizerBase, TrainerCallback

    from ..constraint.lagrangian import LagrangeMultiplier

    Reward: TypeAlias = Callable[..., list[float]]

logger = get_logger(__name__)

# Versions beyond `max_staleness` with which samples may be trained on: the present one, that of the samples which a
# row of the batch waited for, and that of a batch which was made before a synchronization.
_MORE_VERSIONS = 3


class AsyncDCGRPOTrainer(AsyncGRPOTrainer):
    """TRL's experimental `AsyncGRPOTrainer` with a constraint on the discrepancy and masks of the rollouts.

    Takes the arguments of TRL's trainer, with [`AsyncDCGRPOConfig`] for `AsyncGRPOConfig`. With `constraint="none"`
    and `rollout_correction="none"` the losses equal TRL's bit for bit; the discrepancy is logged.

    Args:
        model: Hub id or directory of the causal language model to train, which the server serves too.
        reward_funcs, tools: as in [`~dc_trl.DCGRPOTrainer`], and picklable, because they run in another process.
        args: by default a configuration named after the model.
        rollout_worker: object that samples and scores (TRL's `RolloutWorkerProtocol`); by default TRL's own process.
        weight_transfer: object that sends weights (TRL's `WeightTransferProtocol`); by default TRL's NCCL stream.

    Attributes:
        constraint (`Constraint`): form, correction and statistics of the discrepancy, and λ, which is updated after
            each optimizer step with `constraint="lagrangian"`.

    Raises:
        TypeError: `args` is not an `AsyncDCGRPOConfig`.
        ValueError: these arguments would train nothing, or contradict each other.
    """

    rollout_worker: Any  # defined by TRL

    _tag_names: ClassVar = ["trl", "async-grpo", "dc-grpo"]

    def __init__(
        self,
        model: str,
        reward_funcs: Reward | list[Reward] | None = None,
        args: AsyncDCGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
    ):
        if args is None:
            args = AsyncDCGRPOConfig(f"{model.split('/')[-1]}-AsyncDC-GRPO")
        if not isinstance(args, AsyncDCGRPOConfig):
            raise TypeError(f"args is a {type(args).__name__}: AsyncDCGRPOTrainer needs an AsyncDCGRPOConfig.")
        sharding = sharding_of(args)
        if args.split_by is not None and sharding.kind is not None and not sharding.is_fsdp2:
            raise ValueError(
                f"{args.split_by} reads parameters that {sharding} divides: launch without sharding (DDP) or with "
                "FSDP2 (fsdp_version: 2), or leave it out."
            )
        require_startable(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            environment_factory=environment_factory,
            reward_elsewhere=rollout_worker is not None,
        )
        if reward_funcs is not None:
            functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            reward_funcs = [checked_reward(function) for function in functions]
        versions = args.max_staleness + _MORE_VERSIONS
        ages = 0 if args.split_by is None else versions * args.weight_sync_steps
        self.constraint = Constraint(args, ages, clips=True)
        self.constraint.restrictions = args.restrictions
        self._soundness = Soundness(self)
        self._step_of_version: dict[int, int] = {}  # the optimizer step of each version of the server's weights
        with args.having(acts=True):
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset=train_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
                tools=tools,
                environment_factory=environment_factory,
                rollout_worker=rollout_worker,
                weight_transfer=weight_transfer,
            )
        require_trainable(self.model)
        require_same_logits(self.model, self.temperature)
        limits_of(base_model(self.model), self.processing_class, args.max_completion_length)
        self._lagged: SamplerWeights | None = None
        if args.split_by is not None:
            self._lagged = SamplerWeights(self.accelerator.unwrap_model(self.model), versions)
            size, free = self._lagged.nbytes, psutil.virtual_memory().available
            if size > free:
                raise ValueError(
                    f"{args.split_by} keeps {versions} versions of the trained weights, which max_staleness="
                    f"{args.max_staleness} lets sample: {size / 2**30:.1f} GiB in each process, of which "
                    f"{free / 2**30:.1f} GiB are free. Lower max_staleness, train an adapter (peft_config), or leave "
                    f"{args.split_by} out."
                )
        if self.accelerator.is_main_process:
            self.rollout_queue = VersionedQueue(self.rollout_worker.rollout_buffer)

    @property
    def lagrange_multiplier(self) -> LagrangeMultiplier:
        """λ; constant with `constraint="static"`."""
        return self.constraint.multiplier

    # --- the age of the samples -------------------------------------------------------------------------------------

    def _sync_weight(self):
        super()._sync_weight()
        self._step_of_version[self.model_version] = self.state.global_step
        if self._lagged is not None:
            self._lagged.keep(self.state.global_step)

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        if self.accelerator.is_main_process:  # where batches are made
            batches = loader.base_dataloader
            batches.collate_fn = partial(self._with_steps, batches.collate_fn)
        return loader

    def _with_steps(self, collate: Callable[[list], dict[str, Any]], examples: list) -> dict[str, Any]:
        """Return TRL's batch with the step of the weights that sampled, shape (processes, samples), padded by 0."""
        versions = self.rollout_queue.versions
        steps = [
            # A version from before this run's first synchronization counts as old as the policy's first weights.
            torch.tensor([self._step_of_version.get(versions[sample["group_id"]], 0) for sample in row.samples])
            for row in examples[0]
        ]
        return collate(examples) | {"weights_of_step": pad_sequence(steps, batch_first=True)}

    # --- the loss of a micro-batch ----------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        if self.constraint.correction is not None:  # masking needs the loss's gradient with respect to the advantages
            inputs["advantages"] = inputs["advantages"].detach().requires_grad_()
        steps = inputs["weights_of_step"][0]
        with self._first_forward(model, self._older(steps)) as scores:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        selected = inputs["token_index"] >= 0  # positions in the row of the M tokens that are trained on
        positions, segments = inputs["token_index"][selected], inputs["segment_id"][selected]
        train_logps, infer_logps = scores.pop(None).flatten()[positions], inputs["old_log_probs"][selected]
        lengths = torch.bincount(segments).tolist()

        def matrix(values: Tensor) -> Tensor:
            """Return values of the tokens, shape (M,), by trajectory: shape (B, T), zeros after the end of each."""
            return pad_sequence(values.split(lengths), batch_first=True)

        lagged_logps = None
        if self._lagged is not None:
            step_of_token = steps[segments]
            # Tokens of weights that are not kept have no log p_s, and so are in no statistics and have no penalty.
            lagged = train_logps.detach().masked_fill(step_of_token != self.state.global_step, torch.nan)
            for step, logps in scores.items():
                lagged = torch.where(step_of_token == step, logps.flatten()[positions], lagged)
            lagged_logps = matrix(lagged)
        mask = matrix(torch.ones_like(infer_logps))
        tokens = SampledTokens.of(
            matrix(train_logps.detach()),
            matrix(infer_logps),
            mask,
            matrix(inputs["advantages"][selected].detach())[:, 0],  # the tokens of a trajectory share its advantage
            lagged_logps,
        )
        ages = (self.state.global_step - steps)[: len(lengths)]
        tokens = tokens._replace(age=ages)
        # Micro-batches and processes have different numbers of samples: TRL divides the sums of such pairs.
        of_all = self.accelerator.gather(torch.stack([ages.sum(), ages.new_tensor(len(ages))]).unsqueeze(0))
        self._metrics["train"]["sync/age"].append(tuple(of_all.sum(0).tolist()))
        ratio = bounded_log_ratio(train_logps, infer_logps).exp()
        constrained = self.constraint.apply(tokens)
        penalty = constrained.penalty
        if constrained.weights is not None:
            kept = constrained.weights > 0
            (coefficients,) = torch.autograd.grad(loss, inputs["advantages"], create_graph=True)
            share = (coefficients * inputs["advantages"].detach())[selected]
            loss = loss - share.where(~kept[mask.bool()], 0.0).sum()
            constrained = constrained._replace(weights=matrix(ratio.detach()).where(kept, 0.0))
            penalty = None if penalty is None else penalty.where(kept, 0.0)
        self.constraint.count(constrained)
        if penalty is None:
            return loss
        term = (ratio * penalty[mask.bool()]).where(tokens.scored[mask.bool()], 0.0).sum()
        # TRL's mean is over the tokens of this micro-batch on all processes, whose gradients are averaged.
        count = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1)
        return loss + self.lagrange_multiplier.value * term / count / self.current_gradient_accumulation_steps

    def _older(self, steps: Tensor) -> list[int]:
        """Return the kept steps before the present one whose weights sampled here, `steps`, or in another process."""
        if self._lagged is None:
            return []
        before = [step for step in self._lagged.steps if step != self.state.global_step]
        kept = torch.tensor(before, dtype=steps.dtype, device=steps.device)
        needed = self.accelerator.gather(torch.isin(kept, steps).unsqueeze(0)).any(0)
        return kept[needed].tolist()

    @contextmanager
    def _first_forward(self, model: Any, older: list[int]) -> Iterator[dict[int | None, Tensor]]:
        """Read the log-probabilities of the first forward of a model within the context, of all tokens of its row.

        Args:
            model: policy, perhaps wrapped.
            older: steps whose weights score the same row first, the same in every process.

        Yields:
            log p with a gradient as None, and log p_s by the step of the weights, nats.
        """
        scores: dict[int | None, Tensor] = {}

        def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            hooks[0].remove()  # the forwards below are of the same module
            for step in older:
                assert self._lagged is not None
                with torch.no_grad(), self._lagged.in_place(step):
                    scores[step] = module(*args, **kwargs).log_probs
            hooks.append(module.register_forward_hook(after))

        def after(module: Any, args: tuple, output: Any) -> None:
            scores[None] = output.log_probs

        # Before FSDP2's own hook, which gathers the weights of the present step.
        hooks = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
        try:
            yield scores
        finally:
            for hook in hooks:
                hook.remove()

    # --- the optimizer step as a whole, and the multiplier ----------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._close_step()
        return loss

    def _close_step(self) -> None:
        """Reduce the statistics of the step over all processes, log them, and take one step of dual ascent."""
        report = self.constraint.report(self.accelerator.gather)
        for warning in report.warnings:
            logger.warning(warning)
        for name, value in report.metrics.items():
            self._metrics["train"][name].append(value)
        self.constraint.end_iteration()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as TRL's trainer does; `resume_from_checkpoint` is that of [`~dc_trl.DCGRPOTrainer.train`].

        Raises:
            DivergedError: weights, or the gradients of several steps in a row, are not finite.
            ValueError: the checkpoint is incomplete or damaged.
        """
        found = on_main_process(lambda: resumable_checkpoint(resume_from_checkpoint, self.args.output_dir))
        output = super().train(found, *args, **kwargs)
        self._soundness.require_finite()
        return output

    def _get_grad_norm(self, model, grad_norm=None):
        return self._soundness.checked(super()._get_grad_norm(model, grad_norm=grad_norm), model)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self.control.should_save &= self._soundness.may_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        self._soundness.require_finite()
        # This comes first, since transformers writes last the file that marks a checkpoint as complete.
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / STATE_FILE, self.constraint.state_dict())
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        policy = self.accelerator.unwrap_model(self.model if model is None else model)
        if not load_saved_weights(self, policy, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        with given_rates(self.lr_scheduler, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint, STATE_FILE)
        if path.is_file():
            self.constraint.load_state_dict(read_object(path), within_batch=False)
        else:
            logger.warning(
                f"{checkpoint} holds no {STATE_FILE} (AsyncDCGRPOTrainer did not save it): lambda starts at "
                f"lambda_init={self.args.lambda_init}."
            )


class VersionedQueue:
    """A queue of TRL's rollout samples; `versions` has the version of the first sample's weights by group id."""

    def __init__(self, samples: Any):
        self._samples = samples
        self.versions: dict[int, int] = {}

    def get(self, timeout: float) -> Any:
        sample = self._samples.get(timeout=timeout)
        self.versions[sample.group_id] = sample.model_version
        return sample

    def qsize(self) -> int:
        return self._samples.qsize()
