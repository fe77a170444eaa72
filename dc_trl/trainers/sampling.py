"""`SamplingTrainer`: TRL's GRPO trainer whose policy is sampled, and scored, as it is deployed.

It holds what takes the place of TRL's parts: the engine that samples (`Sampler`), the micro-batches
(`LengthAwareBatches`), and the replay of the engine's experts (`Replay`). What is switched off is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from accelerate import DistributedType
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional
from transformers import GenerationConfig, ProcessorMixin

from ..config import DCGRPOConfig
from ..gate import Limits, limits_of, require_runnable, require_trainable, warn_of_rounding
from ..grading.checked_reward import LARGEST, checked_reward
from ..quantization.adapter import require_adapter_beside
from ..quantization.policy import base_model, unwrapped
from ..quantization.tensors import deployed_tensors
from ..rollouts.buffer import fill_empty, sampled_only
from ..rollouts.truncation import NO_CHOICES, Choices, KeptHead, Named, padded_logps, reported_logps
from ..settings.distribution import sharding_of
from ..settings.paths import shipped
from ..trl_hooks import Completions, HookedTrainer
from .batching import LengthAwareBatches, Scored
from .engines import build_replica, build_vllm, complete_generation_config
from .sampler import OverlappedSampler, Sampler


# Imported only where a run uses them: compressed-tensors and its dependencies take 0.15 s.
if TYPE_CHECKING:
    from ..quantization.deployed_forward import DeployedForward
    from ..rollouts.replica import Replica
    from .replay import Replay

logger = get_logger(__name__)

# Arguments that are checked before a model is loaded.
_CHECKED = (
    *("train_dataset", "eval_dataset", "processing_class", "peft_config", "quantization_config", "rollout_func"),
    *("tools", "environment_factory"),
)

# What a batch says of the weights that sampled it, until it is constrained; see `SamplingTrainer._measure_lag`.
LAG_COLUMNS = {"lagged_logps", "lag"}


class SamplingTrainer(HookedTrainer):
    """TRL's GRPO trainer with the engine, the batches and the forward of a deployed policy; see [`DCGRPOTrainer`].

    Attributes:
        replica (`Replica` or `None`): the engine that samples if `deployment_scheme` is set without vLLM.
        sampler (`Sampler`): the engine that samples, whichever it is, and the schedule of its weights.
        deployed_forward (`DeployedForward` or `None`): makes the policy compute as it is deployed if
            `train_through_quantization` is set; always enabled.
        batches (`LengthAwareBatches` or `None`): forms the micro-batches if `length_aware_batches` is set.
        replay (`Replay` or `None`): replays the engine's experts if `routing_replay` is set.
        truncates (`bool`): whether top-p, top-k or min-p cut off what the engine samples.
        logps_among_kept (`Tensor` or `None`): log π_train, among the kept tokens, of the tokens that were scored last,
            shape (B, T), nats, if the discrepancy is only measured and the loss keeps the whole vocabulary.
    """

    def __init__(self, model: Any, reward_funcs: Any, args: DCGRPOConfig, **kwargs: Any):
        model = shipped(model) if isinstance(model, str) else model
        checked: dict[str, Any] = {name: kwargs.get(name) for name in _CHECKED}
        prompts = require_runnable(model=model, reward_funcs=reward_funcs, args=args, **checked)
        # Set before TRL's constructor, which may already call hooks of this class.
        self.replica: Replica | None = None
        self.deployed_forward: DeployedForward | None = None
        self.batches: LengthAwareBatches | None = None
        self.replay: Replay | None = None
        self._limits: Limits | None = None  # what the policy can read, once it is loaded
        # Choices of the engine for the completions that TRL's methods score: none of them passes them on.
        self._choices = NO_CHOICES
        # TRL would build an engine without a deployment scheme. Ours is built below, when the rest exists.
        use_vllm, args.use_vllm = args.use_vllm, False
        try:
            super().__init__(model, reward_funcs, args, **kwargs)
        finally:
            args.use_vllm = use_vllm
        self._require_fit(prompts)
        self.truncates = bool(args.truncations)
        self.logps_among_kept: Tensor | None = None
        self.sampler = self._build_sampler(use_vllm)
        if args.train_through_quantization and args.deployment_scheme is not None:
            activations = args.train_through_quantization != "weights"
            self.deployed_forward = self.build_deployed_forward(args.deployment_scheme, activations)
            self.deployed_forward.enabled = True
        if args.routing_replay:
            from .replay import Replay

            self.replay = Replay(self, self.replica or self.vllm_generation)
        if args.length_aware_batches:
            self.batches = LengthAwareBatches(self)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.accelerator.distributed_type == DistributedType.FSDP:  # FSDP2: version 1 has another class
            plugin = self.accelerator.state.fsdp_plugin
            if isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
                # It would round what the model returns, TRL's float32 log-probabilities among it, to bfloat16.
                plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)

    def _require_fit(self, prompts: list) -> None:
        """Refuse a loaded policy that would not learn, or does not fit tokenizer and prompts; check each reward."""
        args = self.args
        require_trainable(self.model)
        if args.lora_deployment == "adapter":
            require_adapter_beside(self.model)
        # DeepSpeed and FSDP keep weights in float32 beside those that compute.
        if self.optimizer is None and sharding_of(args).kind is None:
            warn_of_rounding(self.model, str(args.optim), args.learning_rate)
        if not isinstance(self.processing_class, ProcessorMixin):  # images become tokens that are not in the text
            context = args.vllm_max_model_length if args.use_vllm else None
            policy, tokenizer = base_model(self.model), self.text_tokenizer
            self._limits = limits_of(policy, tokenizer, self.max_completion_length, context)
            if self.rollout_func is None and self.environment_factories is None:  # they make tokens or prompts
                for _, alike in groupby(prompts, type):  # texts of one data set, conversations of another
                    self._limits.warn(self.tokenize([*alike])[0])
        self.reward_funcs = [
            function if isinstance(function, nn.Module) else checked_reward(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        if not self.reward_weights.any():
            logger.warning(
                f"reward_weights={self.reward_weights.tolist()}: all advantages will be 0, so nothing is learned. "
                "Give at least one reward another weight."
            )

    def _build_sampler(self, use_vllm: bool) -> Sampler:
        if use_vllm:
            self.use_vllm = True
            self.vllm_generation = build_vllm(self)
            if self.args.rollout_overlap:
                return OverlappedSampler(self, self.vllm_generation, self.micro_batches_per_generation)
            return Sampler(self, self.vllm_generation)
        if self.args.deployment_scheme is not None:
            self.truncates = complete_generation_config(self)
            self.replica = build_replica(self, self.args.deployment_scheme)
        return Sampler(self, self.replica)

    def build_deployed_forward(self, scheme: str, activations: bool = True) -> DeployedForward:
        """Return the policy's deployed forward, inactive, which follows the optimizer's steps; see its arguments."""
        from ..quantization.deployed_forward import DeployedForward

        if self.accelerator.distributed_type == DistributedType.FSDP:
            # The forward quantizes gathered parameters, which must arrive unrounded; it sets its own precision.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        way = self.args.lora_deployment
        forward = DeployedForward(self.model, scheme, activations=activations, lora_deployment=way)
        self.add_callback(forward)
        return forward

    @property
    def micro_batches_per_generation(self) -> int:
        """The number of micro-batches for which one generation batch is used, in all of its iterations."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def completed_passes(self) -> int:
        """The number of completed passes over the present generation batch, below `num_iterations`."""
        return self.micro_batches_done % self.micro_batches_per_generation // self.args.steps_per_generation

    # --- a generation batch -----------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return super().get_batch_samples(self.sampler.look_ahead(epoch_iterator, num_batches), num_batches, device)

    def next_micro_batch(self, generation_batch):
        before = self.generation_batch
        inputs = super().next_micro_batch(generation_batch)
        if not self.model.training:
            return inputs if self.batches is None else self.batches.trimmed(inputs)
        if self.generation_batch is not before:
            if self.batches is not None:
                self.generation_batch = self.batches.of(self.generation_batch)
            if not self.scores_when_sampled:
                self._measure_lag(self.generation_batch)
        return self.generation_batch[self.micro_batches_done % self.args.steps_per_generation]

    def sample_and_score(self, inputs):
        try:
            batch = super().sample_and_score(inputs)
            if (among := self._choices.kept_logps) is not None:  # TRL pads further with `pad_to_multiple_of`
                padding = batch["completion_ids"].shape[1] - among.shape[1]
                self._choices = self._choices._replace(kept_logps=functional.pad(among, (0, padding)))
            batch |= self._choices.in_batch()
        finally:
            self._choices = NO_CHOICES
            if self.replay is not None:
                self.replay.stop()
        if self.model.training and self.scores_when_sampled:
            self._measure_lag([batch], self.args.per_device_train_batch_size)
        return batch

    def _measure_lag(self, slices: list[dict[str, Any]], rows: int | None = None) -> None:
        """Add to slices of a batch whose weights lag the log-probabilities that those gave it, if something asks.

        The policy's weights and those that sampled change places once for all slices. The forwards read what the one
        that scores the slices reads, so that equal weights give equal numbers.

        Args:
            slices: each gets `lagged_logps`, log p_s, shape (B, T), nats, or with `train_through_quantization` `lag`,
                log p − log p_s, of the policy's forward without quantization: by the quantized forward, rounding
                would bury what the weights did.
            rows: of a forward; all those of a slice by default.
        """
        if self.sampler.lagged is None or self.sampler.age == 0:
            return
        with torch.no_grad(), ExitStack() as stack:
            if self.deployed_forward is not None:
                stack.enter_context(self.deployed_forward.active(False))
            with self.sampler.sampling_weights():
                lagged = [self._logps_of(slice_, rows) for slice_ in slices]
            for slice_, logps in zip(slices, lagged, strict=True):
                if self.deployed_forward is None:
                    slice_["lagged_logps"] = logps
                else:
                    slice_["lag"] = self._logps_of(slice_, rows) - logps
        if self.replay is not None:
            self.replay.stop()

    def _logps_of(self, inputs: dict[str, Any], rows: int | None) -> Tensor:
        """Return log p of a slice's completion tokens as the loss takes it, shape (B, T), nats."""
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
        self._choices = Choices.of(inputs)
        try:
            scores = self.score_inputs(inputs, ids, mask, inputs["completion_ids"].shape[1], rows)
        finally:
            self._choices = NO_CHOICES
        return scores[0] if self.logps_among_kept is None else self.logps_among_kept

    def begin_rollout(self, prompts):
        self.sampler.begin_batch(prompts)

    def sample_turn(self, prompt_ids, sample):
        def complete() -> Completions:
            if self.replica is None:
                completion_ids, logprobs = sample()
            else:
                completion_ids, logprobs = self.replica.generate(
                    prompt_ids, self.generation_config, self.temperature, among_kept=self.truncates
                )
            return fill_empty(completion_ids, logprobs, self.text_tokenizer.eos_token_id)

        turn = partial(self.sampler.turn, complete)
        return turn() if self.replay is None else self.replay.sample(prompt_ids, turn)

    def end_rollout(self, prompt_ids, completion_ids, tool_mask, logprobs):
        self.sampler.end_batch(len(completion_ids))
        routes = None if self.replay is None else self.replay.routes(prompt_ids, completion_ids)
        kept = among = None
        if self.truncates and logprobs is not None:
            kept = Named.kept(logprobs, self.accelerator.device)
            by = self.args.compared_by
            if kept is None and by is not None:
                raise ValueError(
                    "The rollouts were sampled with truncation (top_p, top_k or min_p), and do not say which tokens "
                    "were kept: return logprobs of type dc_trl.rollouts.truncation.KeptLogProb from rollout_func, set "
                    f"top_p=1.0, top_k=0 and min_p=None, or {self.args.without_comparison}."
                )
            if kept is not None and by is None:  # the loss is TRL's
                among = padded_logps(logprobs).to(self.accelerator.device)
                logprobs = reported_logps(logprobs)
        named = None
        if self.args.score_centering and self.replica is None and logprobs is not None:
            named = Named.most_probable(logprobs, self.accelerator.device)
        self._choices = Choices(kept, routes, among, named)
        return sampled_only(completion_ids, tool_mask), logprobs

    def tokenize(self, prompts):
        tokenized = super().tokenize(prompts)
        if self._limits is not None:
            self._limits.require(tokenized[0], prompts)
        return tokenized

    def take_rewards(self, rewards):
        """Refuse rewards of models, and weighted sums, that are not finite; functions are checked when they return.

        Args:
            rewards: shape (N, functions), NaN where there is none.

        Raises:
            ValueError: one is not finite.
        """
        of_models = torch.tensor([isinstance(function, nn.Module) for function in self.reward_funcs])
        total = total_rewards(rewards, self.reward_weights)
        wrong = ~rewards[:, of_models].isfinite().all(1) | (total.abs() > LARGEST)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            given = dict(zip(self.reward_func_names, rewards[row].tolist(), strict=True))
            raise ValueError(
                f"The rewards of completion {row}, {given} with reward_weights={self.reward_weights.tolist()}, or "
                f"their sum, are not finite or exceed {LARGEST:g}: return finite rewards, or lower the weights."
            )

    # --- forward and loss -------------------------------------------------------------------------------------------

    def score_tokens(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options):
        if batch_size is None or self.batches is None:
            tokens = (input_ids, attention_mask, logits_to_keep, batch_size)
            scores, self.logps_among_kept = self._score_as_sampled(model, self._choices, *tokens, **options)
            return scores
        # Old and reference log-probabilities of a whole generation batch.
        forward = partial(self._score_as_sampled, model)
        scores, self.logps_among_kept = self.batches.score(
            forward, self._choices, input_ids, attention_mask, logits_to_keep, batch_size, options
        )
        return scores

    def _score_as_sampled(
        self,
        model: Any,
        choices: Choices,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Scored:
        """Score tokens as `score_tokens` does, with the experts and among the tokens that the engine chose."""
        if self.replay is not None and choices.routes is not None:
            self.replay.start(choices.routes)
        tokens = (input_ids, attention_mask, logits_to_keep, batch_size)
        score = partial(super().score_tokens, model, *tokens, **options)
        if choices.kept is None:
            return score(), None
        measured = choices.kept_logps is not None  # and no more: the loss is TRL's
        policy = base_model(unwrapped(self.accelerator, model))
        completion_ids, in_float32 = input_ids[:, -logits_to_keep:], self.args.cast_lm_head_to_fp32
        with KeptHead(
            policy, choices.kept, completion_ids, self.temperature, in_float32, gradient=not measured
        ) as head:
            scores = score()
        if measured:
            return scores, head.log_probs(scores[0].detach())
        return (head.log_probs(scores[0]), *scores[1:]), None

    def policy_loss(self, model, inputs):
        choices = self._choices = Choices.of(inputs)
        logged = {name: len(values) for name, values in self.metrics_since_log("train").items()}
        try:
            loss = super().policy_loss(model, inputs)
        finally:
            self._choices = NO_CHOICES
        if self.replay is not None and choices.routes is not None:  # a resumed batch may have none
            self.replay.log(inputs)
            if not torch.is_grad_enabled():
                self.replay.stop()
        if self.batches is not None:
            self.batches.weigh_means(inputs, logged)
        return loss

    def training_step(self, model, inputs, num_items_in_batch):
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            if self.replay is not None:
                self.replay.stop()  # not earlier, since gradient checkpointing computes the forward again

    # --- completions of the policy as it is deployed ----------------------------------------------------------------

    def deployed_completion_ids(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Return greedy completions of the policy as it is deployed, by replica or vLLM, with the present weights.

        Args:
            prompt_ids: token ids of the prompts; the same number of prompts in every process.

        Returns:
            Token ids of one completion for each prompt, at most `max_completion_length`.

        Raises:
            ValueError: there is no engine (neither `deployment_scheme` nor `use_vllm` is set).
        """
        self.sampler.bring_weights(training=False)
        if self.replica is not None:
            config = GenerationConfig(
                max_new_tokens=self.max_completion_length,
                pad_token_id=self.text_tokenizer.pad_token_id,
                eos_token_id=self.eos_token_ids,
                do_sample=False,
            )
            return self.replica.generate(prompt_ids, config, 1.0)[0]
        if not self.use_vllm:
            raise ValueError("deployment_scheme=None and use_vllm=False: set one, so that an engine answers.")
        generation = self.vllm_generation
        of_training, generation.temperature = generation.temperature, 0.0
        try:
            return generation.generate(prompts=prompt_ids, images=None, num_generations=1)[1]
        finally:
            generation.temperature = of_training

    def deployed_completions(self, prompts: list) -> list:
        """Return greedy completions of the policy as it is deployed, plain or conversational like the prompts.

        Args:
            prompts: plain (`str`) or conversational (list of messages) prompts; the same number in every process.

        Raises:
            ValueError: the trainer has tools, or see `deployed_completion_ids`.
        """
        return self._complete(prompts)[0]

    def _complete(self, prompts: list) -> tuple[list, list[list[int]]]:
        """Return the completions of `deployed_completions` and their token ids."""
        if self.tools:
            raise ValueError(
                "deployed_completions and deployed_rewards sample one turn, and this trainer has tools or an "
                "environment_factory, which need several turns: use evaluate(), which samples all turns."
            )
        completion_ids = self.deployed_completion_ids(self.tokenize(prompts)[0])
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if isinstance(prompts[0], str):
            return texts, completion_ids
        return [[{"role": "assistant", "content": text}] for text in texts], completion_ids

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
        completions, completion_ids = self._complete(prompts)
        per_function = self.score_unrecorded(rows, prompts, completions, completion_ids)
        SamplingTrainer.take_rewards(self, per_function)
        totals = total_rewards(per_function, self.reward_weights).view(self.accelerator.num_processes, -1)
        local = totals[self.accelerator.process_index].tolist()
        return [None if math.isnan(value) else value for value in local]

    def deployed_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's present weights, gathered and merged; see `quantization.tensors.deployed_tensors`.

        Every process must iterate to the end.
        """
        gathered_by_trl = self.vllm_generation.gathered if self.use_vllm else None
        return deployed_tensors(self.accelerator, self.model, gathered_by_trl)


def total_rewards(rewards_per_func: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of several reward functions, shape (N,); NaN where no function applies.

    Args:
        rewards_per_func: of each completion, shape (N, functions); NaN where a function does not apply.
        weights: weight of each function, shape (functions,).
    """
    total = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(-1)
    return total.masked_fill(rewards_per_func.isnan().all(-1), torch.nan)
