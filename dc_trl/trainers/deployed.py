"""The policy as it is deployed: the engine that samples in training, and the checkpoint for a server.

`DeployedPolicyTrainer` extends TRL's trainer by both; `DCGRPOTrainer` adds the constraint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import DistributedType
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import GenerationConfig, ProcessorMixin, TrainerCallback
from trl.extras.profiling import profiling_context
from trl.generation.vllm_generation import VLLMGeneration

from ..config import DCGRPOConfig
from ..constraint.advantages import total_rewards
from ..quantization.policy import base_model, require_shared_embeddings, unwrapped
from ..quantization.tensors import deployed_tensors
from ..resuming.checkpoints import SAMPLER_FOLDER
from ..rollouts.buffer import fill_empty, sampled_only
from ..rollouts.neutral_sampling import SERVER_DEFAULTS, TRUNCATIONS, restrictions, truncates
from ..rollouts.padding_free import PaddingFree, prepared
from ..rollouts.sync_schedule import SyncSchedule
from ..rollouts.truncation import Kept, KeptHead
from ..settings.distribution import require_as_asked
from ..settings.reward_functions import RewardFunction, call_reward
from .gated import GatedTrainer
from .required_servers import config_of, require_servers


# Imported only where a deployment scheme is used: compressed-tensors and its dependencies take 0.15 s.
if TYPE_CHECKING:
    from ..quantization.checkpoint import CheckpointWriter
    from ..quantization.deployed_forward import DeployedForward
    from ..rollouts.replica import Replica

_COLUMNS_OF_TRL = ("prompt", "completion", "completion_ids")  # TRL passes them itself, or not at all
# Parameters of TRL's engine that are attributes of the trainer, and those that are its fields named vllm_*.
_OF_TRAINER = (
    *("model", "accelerator", "processing_class", "max_completion_length"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
)
_OF_VLLM = (
    *("mode", "server_base_url", "server_host", "server_port", "group_port", "server_timeout", "max_model_length"),
    *("tensor_parallel_size", "gpu_memory_utilization", "enable_sleep_mode", "model_impl", "structured_outputs_regex"),
)


class DeployedPolicyTrainer(GatedTrainer):
    """TRL's GRPO trainer whose policy is sampled and written as it is deployed; see [`DCGRPOTrainer`].

    Attributes:
        replica (`Replica` or `None`): the engine that samples if `deployment_scheme` is set without vLLM.
        deployed_forward (`DeployedForward` or `None`): makes the policy compute as it is deployed if
            `train_through_quantization` is set; always enabled.
        padding_free (`PaddingFree` or `None`): makes forward passes compute only real tokens if `padding_free` is set.
    """

    _last_loaded_step: int  # TRL's attribute: the step whose weights vLLM holds

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        # Set before TRL's constructor, which may already call hooks of this class.
        self.replica: Replica | None = None
        self.deployed_forward: DeployedForward | None = None
        self.padding_free: PaddingFree | None = None
        self._deployment_writer: CheckpointWriter | None = None
        self._schedule = SyncSchedule(args.weight_sync_steps)
        self._held: int | None = None  # the step whose weights the engine holds
        self._truncated = args.truncated_sampling
        self._kept: Kept | None = None  # kept tokens of the completions that the present call of a hook scores
        self._engine_context = args.vllm_max_model_length if args.use_vllm else None
        self._engine_is_server = args.use_vllm and args.vllm_mode == "server"
        # TRL would build an engine without a deployment scheme. Ours is built below, when the rest exists.
        use_vllm, args.use_vllm = args.use_vllm, False
        try:
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        finally:
            args.use_vllm = use_vllm
        require_as_asked(args, self.accelerator)
        if args.padding_free:
            models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
            self.padding_free = prepared([unwrapped(self.accelerator, model) for model in models], self.accelerator)
        if use_vllm:
            self.use_vllm = True
            self.vllm_generation = self._build_vllm()
        elif args.deployment_scheme is not None:
            self.replica = self._build_replica(args.deployment_scheme)
        if args.train_through_quantization and args.deployment_scheme is not None:
            self.deployed_forward = self._align_forward(args.deployment_scheme)

    def _require_engine(self, model, args):
        if self._engine_is_server:
            require_servers(args, config_of(model, args))

    def _align_forward(self, scheme: str) -> DeployedForward:
        sharding = self.accelerator.distributed_type
        if sharding == DistributedType.DEEPSPEED or (
            sharding == DistributedType.FSDP and not self.accelerator.is_fsdp2
        ):
            raise ValueError(
                f"train_through_quantization=True reads whole parameters, which {sharding.value} does not give: "
                "launch with FSDP2 (fsdp_version: 2) or without sharding, or set train_through_quantization=False."
            )
        if sharding == DistributedType.FSDP:
            # The forward quantizes gathered parameters, which must arrive unrounded; it sets its own precision.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        forward = self._build_deployed_forward(scheme)
        forward.enabled = True
        return forward

    def _build_deployed_forward(self, scheme: str) -> DeployedForward:
        """Return the policy's deployed forward, inactive, which follows the optimizer's steps."""
        from ..quantization.deployed_forward import DeployedForward

        forward = DeployedForward(self.model, scheme)
        self.add_callback(_ParametersMove(forward))
        return forward

    def _build_replica(self, scheme: str) -> Replica:
        from ..rollouts.replica import Replica

        if isinstance(self.processing_class, ProcessorMixin):
            raise ValueError(
                f"deployment_scheme={scheme!r} samples text only, and the processing_class is a multimodal processor: "
                "use use_vllm=True for this model."
            )
        self._complete_generation_config()
        return Replica(self.model, scheme, self.accelerator.device)

    def _build_vllm(self) -> VLLMGeneration:
        """Return the vLLM engine that samples, with the arguments that TRL's constructor passes to its own engine."""
        from ..rollouts.overlap import OverlappedGeneration
        from ..rollouts.vllm_backends import ColocateGeneration, Generation, ServerGeneration

        args, model = self.args, self.model
        batch_size = args.per_device_train_batch_size * args.steps_per_generation
        of_trl: dict[str, Any] = {
            **{name: getattr(self, name) for name in _OF_TRAINER},
            **{name: getattr(args, f"vllm_{name}") for name in _OF_VLLM},
            "max_num_seqs": batch_size * args.vllm_tensor_parallel_size,
            "trust_remote_code": args.trust_remote_code,
            "logprobs": args.named_tokens,
            # Under a constraint `logprobs` may be 0 here, which is what the trainer requests if it needs no more.
            "generation_kwargs": {
                name: value
                for name, value in (args.generation_kwargs or {}).items()
                if name != "logprobs" or args.named_tokens == 0
            },
        }
        # Only a checkpoint can bring back older weights.
        weight_sync = "checkpoint" if args.weight_sync_steps > 1 else args.weight_sync
        if args.vllm_mode == "server":
            _check_server_defaults(args, model)
            require_shared_embeddings(
                model,
                reason="a server of this model uses one matrix for both",
                remedy="Use vllm_mode='colocate' with deployment_scheme, or the in-process replica (use_vllm=False)",
            )
            server_mode = OverlappedGeneration if args.rollout_overlap else ServerGeneration
            return server_mode(
                deployment_scheme=args.deployment_scheme,
                weight_sync=weight_sync,
                weight_sync_dir=args.weight_sync_dir,
                vllm_request_timeout=args.vllm_request_timeout,
                vllm_time_limit=args.vllm_time_limit,
                vllm_max_retries=args.vllm_max_retries,
                server_base_urls=args.vllm_server_base_urls,
                routing_replay=args.routing_replay,
                **of_trl,
            )
        if args.deployment_scheme is not None or weight_sync == "checkpoint":
            return ColocateGeneration(
                deployment_scheme=args.deployment_scheme, weight_sync_dir=args.weight_sync_dir, **of_trl
            )
        require_shared_embeddings(
            model,
            reason="TRL merges adapters in place, in both at once",
            remedy="Set deployment_scheme (for example 'bf16')",
        )
        return Generation(**of_trl)

    def _complete_generation_config(self) -> None:
        """Make the replica sample as `model.generate` does, with the model's own settings where TRL sets none.

        Raises:
            ValueError: these settings restrict sampling under a constraint, or end completions by their text.
        """
        config = self.generation_config
        config.update(**base_model(self.model).generation_config.to_dict(), defaults_only=True)
        if config.top_k == -1:  # vLLM's value for no limit
            config.top_k = 0
        if config.stop_strings is not None:
            raise ValueError(
                f"stop_strings={config.stop_strings!r} end completions by their text, which the in-process replica "
                "does not read: leave them out of generation_kwargs and of the model's generation_config, or sample "
                "with vLLM (use_vllm=True, generation_kwargs={'stop': ...})."
            )
        settings = {name: value for name, value in vars(config).items() if name[0] != "_"}
        _check_model_settings(self.args, settings, corrected=TRUNCATIONS)
        self._truncated = self.args.compared_by is not None and truncates(settings)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.replica is None:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            completion_ids, logprobs = self.replica.generate(
                prompt_ids, self.generation_config, self.temperature, among_kept=self._truncated
            )
        return fill_empty(completion_ids, logprobs, self._tokenizer.eos_token_id)

    def _generate(self, prompts):
        training = self.model.training
        self._bring_weights(training)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *others = super()._generate(prompts)
        if self._engine is not None:
            self._tell_age(training, len(prompts))
        truncated = self._truncated and logprobs is not None
        self._kept = Kept.of(completion_ids, logprobs, self.accelerator.device) if truncated else None
        return prompt_ids, completion_ids, sampled_only(completion_ids, tool_mask), completions, logprobs, *others

    # --- truncated sampling: log-probabilities are normalized over the tokens the engine kept ------------------------

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self._kept is not None:
            batch["kept_ids"], batch["kept_counts"] = self._kept
            self._kept = None
        return batch

    def _compute_loss(self, model, inputs):
        if "kept_ids" in inputs:
            self._kept = Kept(inputs["kept_ids"], inputs["kept_counts"])
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._kept = None

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        score = super()._get_per_token_logps_and_entropies
        policy = base_model(unwrapped(self.accelerator, model))
        padded = None
        if self.padding_free is not None:
            model, padded = self.padding_free.around(model), self.padding_free.padded
        if self._kept is None:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        completion_ids = input_ids[:, -logits_to_keep:]
        in_float32 = self.args.cast_lm_head_to_fp32
        with KeptHead(policy, self._kept, completion_ids, self.temperature, in_float32, padded) as head:
            logps, *others = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        return head.log_probs(logps), *others

    def deployed_completion_ids(self, prompt_ids: list[list[int]], temperature: float = 0.0) -> list[list[int]]:
        """Return completions of the policy as it is deployed, by the replica or by vLLM, with the present weights.

        Args:
            prompt_ids: token ids of the prompts; the same number of prompts in every process.
            temperature: sampling temperature; 0 for greedy completions.

        Returns:
            Token ids of one completion for each prompt, at most `max_completion_length`.

        Raises:
            ValueError: there is no engine (neither `deployment_scheme` nor `use_vllm` is set).
        """
        self._bring_weights(training=False)
        if self.replica is not None:
            return self._complete_by_replica(self.replica, prompt_ids, temperature)
        if self.use_vllm:
            return self._complete_by_vllm(prompt_ids, temperature)
        raise ValueError(
            "deployment_scheme=None and use_vllm=False: set one of them, since there is no engine to complete prompts."
        )

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
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        completion_ids = self.deployed_completion_ids(prompt_ids)
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if isinstance(prompts[0], str):
            return texts, completion_ids
        return [[{"role": "assistant", "content": text}] for text in texts], completion_ids

    def deployed_rewards(self, rows: list[dict[str, Any]], reward: RewardFunction | None = None) -> list[float | None]:
        """Return rewards of greedy completions of the policy as it is deployed.

        Args:
            rows: rows of a data set with `prompt` and the columns of the rewards; the same number in every process.
            reward: function called like TRL's reward functions, possibly async; by default the run's, weighted.

        Returns:
            The reward of each row, or None if no function scored it.

        Raises:
            TypeError, ValueError: see `deployed_completion_ids` and `call_reward`.
        """
        prompts = [row["prompt"] for row in rows]
        completions, completion_ids = self._complete(prompts)
        if reward is not None:
            columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _COLUMNS_OF_TRL}
            return call_reward(
                reward,
                prompts=prompts,
                completions=completions,
                completion_ids=completion_ids,
                trainer_state=self.state,
                log_extra=_no_log,
                log_metric=_no_log,
                **columns,
            )
        per_function = super()._calculate_rewards(rows, prompts, completions, completion_ids)
        # Only values that reward functions log for rollouts are kept.
        self._pending_extra_logs.clear()
        self._pending_metrics.clear()
        totals = total_rewards(per_function, self.reward_weights).view(self.accelerator.num_processes, -1)
        local = totals[self.accelerator.process_index].tolist()
        return [None if math.isnan(value) else value for value in local]

    def _complete_by_vllm(self, prompt_ids: list[list[int]], temperature: float) -> list[list[int]]:
        generation = self.vllm_generation
        of_training, generation.temperature = generation.temperature, temperature
        try:
            return generation.generate(prompts=prompt_ids, images=None, num_generations=1)[1]
        finally:
            generation.temperature = of_training

    def _complete_by_replica(
        self, replica: Replica, prompt_ids: list[list[int]], temperature: float
    ) -> list[list[int]]:
        sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
        config = GenerationConfig(
            max_new_tokens=self.max_completion_length,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self.eos_token_ids,
            do_sample=temperature > 0,
            **sampling,
        )
        return replica.generate(prompt_ids, config, temperature or 1.0)[0]

    # --- weights of the engine ---------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Any:
        """The engine that samples with its own copy of the weights, the replica or vLLM; None for `model.generate`."""
        return self.vllm_generation if self.use_vllm else self.replica

    @property
    def weight_syncs(self) -> tuple[int, int]:
        """The number of weight syncs in training, and the number of syncs that a lag saved."""
        return self._schedule.syncs, self._schedule.steps - self._schedule.syncs

    def _bring_weights(self, training: bool) -> None:
        """Load the weights that should sample into the engine: the present ones, or in training perhaps older ones."""
        if self._engine is None:
            return
        schedule, step = self._schedule, self.state.global_step
        if not (training and schedule.lags(step)):
            self._sync(keep=schedule.lags(step))
            if training:
                schedule.synced(step)
        elif self._held != schedule.step:  # an evaluation has sampled in between
            self._engine.go_back()
            self._held = schedule.step
        self._last_loaded_step = step  # so that TRL does not sync

    def _sync(self, keep: bool) -> None:
        """Load the present weights into the engine; with `keep`, it can go back to those of training."""
        if self.replica is not None:
            # Requantizing costs less than one decoding step; tracking changes of the weights would be less reliable.
            self.replica.sync(unwrapped(self.accelerator, self.model_wrapped), keep)
        elif self._held != self.state.global_step:
            with profiling_context(self, "sync_weights"):
                if keep:
                    self.vllm_generation.sync_weights(keep=True)
                else:
                    self.vllm_generation.sync_weights()
            for name, value in self.vllm_generation.last_sync.items():
                self._metrics["train"][f"sync/{name}"].append(value)
        self._held = self.state.global_step

    def _tell_age(self, training: bool, completions: int) -> None:
        """Log the step whose weights have sampled these completions."""
        age = self._age_of_rollout() if training else 0
        if not self._may_lag:
            return
        self._pending_extra_logs["weights_of_step"].extend([self.state.global_step - age] * completions)
        if training:
            self._metrics["train"]["sync/age"].append(age)
            self._metrics["train"]["sync/count"].append(self._schedule.syncs)

    @property
    def _may_lag(self) -> bool:
        """Whether the settings allow rollouts of training with weights from before the present step."""
        return self._schedule.every > 1

    def _age_of_rollout(self) -> int:
        """Count a generation batch of training, and return the age of its weights in optimizer steps."""
        return self._schedule.sampled(self.state.global_step)

    def _save_weights(self, folder: str) -> dict[str, Any]:
        """Save the sampler's weights, unless new ones are due, and return the state for `_load_weights`."""
        schedule = self._schedule
        kept = schedule.every > 1 and not schedule.due(self.state.global_step)
        if kept and self.args.should_save:
            self._engine.save_weights(Path(folder, SAMPLER_FOLDER))
        return {"schedule": schedule.state_dict(), "engine": self._engine_name, "kept": kept}

    def _load_weights(self, folder: str, state: dict[str, Any]) -> None:
        """Make the engine sample with the weights that `_save_weights` saved until new ones are due."""
        self._schedule.load_state_dict(state["schedule"])
        if self._schedule.due(self.state.global_step):
            return
        if state["kept"] and state["engine"] == self._engine_name:
            self._engine.load_weights(Path(folder, SAMPLER_FOLDER))
            self._held = self._schedule.step
        else:
            self._schedule.wanted = True

    def _sampling_state(self) -> dict[str, Any]:
        """Return the state of sampling between two optimizer steps."""
        return {"schedule": self._schedule.state_dict()}

    def _return_to_sampling_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `_sampling_state` returned, so that it can be saved after a later step has failed."""
        self._schedule.load_state_dict(state["schedule"])

    @property
    def _engine_name(self) -> str:
        return f"{'vllm' if self.use_vllm else 'replica'} {self.args.deployment_scheme}"

    # --- the checkpoint that is served -----------------------------------------------------------------------------

    def deployed_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's present weights, gathered and merged; see `quantization.tensors.deployed_tensors`.

        Every process must iterate to the end.
        """
        gathered_by_trl = self.vllm_generation._iter_named_params if self.use_vllm else None
        return deployed_tensors(self.accelerator, self.model, gathered_by_trl)

    def save_deployment(self, directory: str | os.PathLike[str]) -> None:
        """Write the policy as it is deployed, in `deployment_scheme` or bf16; see `CheckpointWriter.write`.

        Every process must call it.

        Raises:
            ValueError: see `deployed_tensors`.
            OSError: the file system refused; the previous contents are unharmed.
        """
        tensors = self.deployed_tensors()
        if self.accelerator.is_main_process:
            self._open_deployment_writer().write(tensors, directory)
        for _ in tensors:
            pass  # takes part in gathering

    def _open_deployment_writer(self) -> CheckpointWriter:
        if self._deployment_writer is None:
            from ..quantization.checkpoint import CheckpointWriter

            policy = unwrapped(self.accelerator, self.model)
            scheme = self.args.deployment_scheme or "bf16"
            self._deployment_writer = CheckpointWriter(policy, scheme, self.processing_class)
        return self._deployment_writer


class _ParametersMove(TrainerCallback):
    """Reports optimizer steps to a `DeployedForward`, since PyTorch does not see the writes of fused optimizers."""

    def __init__(self, forward: DeployedForward):
        self._forward = forward

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._forward.forget()


def _no_log(*args: Any) -> None:
    """Ignore reward logs outside rollouts."""


def _check_server_defaults(args: DCGRPOConfig, policy: Any) -> None:
    """Refuse settings that a vLLM server takes from the model where TRL's requests set none.

    Raises:
        ValueError: a setting restricts sampling under a constraint.
    """
    of_model = base_model(policy).generation_config.to_dict()
    requested = {"top_p": args.top_p, "top_k": args.top_k, "repetition_penalty": args.repetition_penalty}
    requested |= {"min_p": args.min_p or 0.0} | (args.generation_kwargs or {})
    left_open = [name for name in SERVER_DEFAULTS if requested.get(name) is None]
    _check_model_settings(args, {name: of_model[name] for name in left_open if of_model.get(name) is not None})


def _check_model_settings(args: DCGRPOConfig, settings: dict[str, Any], corrected: Collection[str] = ()) -> None:
    if args.compared_by is None:
        return
    for name, value, remedy in restrictions(settings, corrected):
        raise ValueError(
            f"{name}={value!r} of the model's generation_config makes the engine sample from a distribution that is "
            f"not the policy's, and {args.comparison} would take that difference for mismatch: {remedy} in "
            f"model.generation_config (generation_config.json) or {args.compared_by}='none'."
        )
