"""Builds what samples for a trainer: the in-process replica, or vLLM in the mode that the arguments select.

`require_servers` checks before the model is loaded that the vLLM servers of a run are up and fit it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.logging import get_logger
from peft import PeftModel
from transformers import PretrainedConfig, ProcessorMixin
from trl.generation.vllm_generation import VLLMGeneration

from ..config import DCGRPOConfig
from ..quantization.adapter import require_adapter_beside
from ..quantization.policy import base_model, require_shared_embeddings
from ..settings.distribution import sharding_of
from ..settings.neutral_sampling import SERVER_DEFAULTS, TRUNCATIONS, restrictions, truncations
from ..settings.pretrained import load_config
from .sampler import OverlappedSampler, Sampler


# Imported only where a deployment scheme is used: compressed-tensors and its dependencies take 0.15 s.
if TYPE_CHECKING:
    from .replica import Replica

logger = get_logger(__name__)

# Parameters of TRL's engine that are attributes of the trainer, and those that are its fields named vllm_*.
_OF_TRAINER = (
    *("model", "accelerator", "processing_class", "max_completion_length"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
)
_OF_VLLM = (
    *("mode", "server_base_url", "server_host", "server_port", "group_port", "server_timeout", "max_model_length"),
    *("tensor_parallel_size", "gpu_memory_utilization", "enable_sleep_mode", "model_impl", "structured_outputs_regex"),
)


def require_engine(args: DCGRPOConfig, model: Any, **arguments: Any) -> None:
    """Refuse, before a model is loaded, an engine that cannot sample this policy, or servers that do not fit it.

    Args:
        args: settings of the run.
        model: the policy, or its Hub id or directory.
        **arguments: further arguments of the trainer; `peft_config` and what asks an engine turn by turn are read.

    Raises:
        ValueError: names the setting, its value and the remedy.
        ServerError: see `require_servers`.
    """
    for name in ("tools", "environment_factory", "rollout_func"):
        if args.rollout_overlap and arguments.get(name):
            raise ValueError(
                f"rollout_overlap=True samples a generation batch by one request ahead of training, and {name} "
                f"asks the engine turn by turn: leave {name} out, or set rollout_overlap=False."
            )
    new_adapter = arguments.get("peft_config") is not None
    if args.lora_deployment == "adapter" and not new_adapter:
        require_adapter_beside(model)
    adapted = new_adapter or isinstance(model, PeftModel)
    if adapted and args.deployment_scheme is not None and not args.use_vllm and sharding_of(args).is_fsdp2:
        name = f"deployment_scheme={args.deployment_scheme!r} without use_vllm"
        raise ValueError(f"{name} merges no adapter that FSDP2 shards: set use_vllm=True, or launch with DDP.")
    if args.use_vllm and args.vllm_mode == "server":
        revision, trust = (args.model_init_kwargs or {}).get("revision", "main"), args.trust_remote_code
        by_name = isinstance(model, str)
        require_servers(
            args, load_config(model, revision=revision, trust_remote_code=trust) if by_name else model.config
        )


def build_sampler(trainer: Any) -> Sampler:
    """Return what samples for a trainer: its replica, its vLLM engine or, without either, the policy itself.

    Raises:
        ValueError, ServerError: see `build_replica` and `build_vllm`.
    """
    args = trainer.args
    if trainer.use_vllm:
        engine = trainer.vllm_generation = build_vllm(trainer)
        if args.rollout_overlap:
            return OverlappedSampler(trainer, engine, bool(args.truncations), trainer.micro_batches_per_generation)
        return Sampler(trainer, engine, bool(args.truncations))
    if args.deployment_scheme is None:
        return Sampler(trainer, None, bool(args.truncations))
    truncates = complete_generation_config(trainer)
    return Sampler(trainer, build_replica(trainer, args.deployment_scheme), truncates)


def build_replica(trainer: Any, scheme: str) -> Replica:
    """Return the replica that samples in a scheme, with the weights of its policy.

    Raises:
        ValueError: the processing class is a multimodal processor.
    """
    from .replica import Replica

    if isinstance(trainer.processing_class, ProcessorMixin):
        raise ValueError(
            f"deployment_scheme={scheme!r} samples text only, and the processing_class is a multimodal processor: "
            "use use_vllm=True for this model."
        )
    return Replica(trainer.model, scheme, trainer.accelerator.device, trainer.args.lora_deployment)


def build_vllm(trainer: Any) -> VLLMGeneration:
    """Return the vLLM engine that samples, with the arguments that TRL's constructor passes to its own engine.

    Raises:
        ValueError: adapter, generation_config or processing class do not go with the engine.
        ServerError: a server cannot be reached, or does not fit.
    """
    from .overlap import OverlappedGeneration
    from .vllm_backends import ColocateGeneration, Generation, ServerGeneration

    args, model = trainer.args, trainer.model
    if args.rollout_overlap and isinstance(trainer.processing_class, ProcessorMixin):
        raise ValueError(
            "rollout_overlap=True samples text only, and the processing_class is a multimodal processor: pass its "
            "tokenizer, or set rollout_overlap=False."
        )
    if trainer.tools and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode and args.deployment_scheme:
        raise ValueError(
            "vllm_enable_sleep_mode=True writes the checkpoint anew before each turn of the tools: set it to False."
        )
    batch_size = args.per_device_train_batch_size * args.steps_per_generation
    of_trl: dict[str, Any] = {
        **{name: getattr(trainer, name) for name in _OF_TRAINER},
        **{name: getattr(args, f"vllm_{name}") for name in _OF_VLLM},
        "max_num_seqs": batch_size * args.vllm_tensor_parallel_size,
        "trust_remote_code": args.trust_remote_code,
        "logprobs": args.named_tokens,
        # `logprobs` may be 0 here, which is what the trainer requests if it needs no more.
        "generation_kwargs": {
            name: value
            for name, value in (args.generation_kwargs or {}).items()
            if name != "logprobs" or args.named_tokens == 0
        },
    }
    # Only a checkpoint can bring back older weights.
    weight_sync = "checkpoint" if args.weight_sync_steps > 1 else args.weight_sync
    if args.vllm_mode == "server":
        # A server takes what TRL's requests do not set from the model.
        of_model = base_model(model).generation_config.to_dict()
        requested = {"top_p": args.top_p, "top_k": args.top_k, "repetition_penalty": args.repetition_penalty}
        requested |= {"min_p": args.min_p or 0.0} | (args.generation_kwargs or {})
        left_open = [name for name in SERVER_DEFAULTS if requested.get(name) is None]
        _check_model_settings(args, {name: of_model[name] for name in left_open if of_model.get(name) is not None})
        require_shared_embeddings(model)
        server_mode = OverlappedGeneration if args.rollout_overlap else ServerGeneration
        return server_mode(args, weight_sync, **of_trl)
    if args.deployment_scheme is not None or weight_sync == "checkpoint":
        return ColocateGeneration(args, **of_trl)
    require_shared_embeddings(model)
    return Generation(**of_trl)


def complete_generation_config(trainer: Any) -> bool:
    """Make the replica sample as `model.generate` does, with the model's own settings where TRL sets none.

    Returns:
        Whether the replica samples from a truncated distribution.

    Raises:
        ValueError: these settings restrict sampling under a constraint, or end completions by their text.
    """
    config = trainer.generation_config
    config.update(**base_model(trainer.model).generation_config.to_dict(), defaults_only=True)
    config.use_cache = True  # a model's configuration may say no, and each token would read all before it again
    if config.top_k == -1:  # vLLM's value for no limit
        config.top_k = 0
    if config.stop_strings is not None:
        raise ValueError(
            f"stop_strings={config.stop_strings!r} end completions by their text, which the in-process replica "
            "does not read: leave them out of generation_kwargs and of the model's generation_config, or sample "
            "with vLLM (use_vllm=True, generation_kwargs={'stop': ...})."
        )
    settings = {name: value for name, value in vars(config).items() if name[0] != "_"}
    _check_model_settings(trainer.args, settings, corrected=TRUNCATIONS)
    return bool(truncations(settings))


def _check_model_settings(args: DCGRPOConfig, settings: dict[str, Any], corrected: Collection[str] = ()) -> None:
    """Refuse settings of a model that restrict sampling under a constraint."""
    if args.compared_by is None:
        return
    for name, value, remedy in restrictions(settings, corrected):
        setting = f"{name}={value!r} of the model's generation_config"
        raise ValueError(args.other_distribution(setting, f"{remedy} in generation_config.json"))


def require_servers(args: DCGRPOConfig, config: PretrainedConfig) -> None:
    """Refuse servers that are not up within `vllm_server_timeout`, or do not fit. Call it in every process.

    `ServerGeneration` makes the checks that need the loaded model, and those of the weight stream's connections.

    Args:
        args: arguments of the trainer, with `vllm_mode="server"`.
        config: configuration of the trained model.

    Raises:
        ServerError: a server is refused; the message names it, the reason and the option to change.
    """
    from ..serving.errors import ServerError
    from .vllm_backends import connect, needs_checkpoint, raised_together

    weight_sync: str = args.weight_sync
    if weight_sync == "auto":
        # What else decides, the policy and whether the GPU is shared, is not known yet.
        weight_sync = "checkpoint" if needs_checkpoint(args, args.device) else "none"
    least_rank = int(args.lora_deployment == "adapter")  # the adapter's own is not known yet
    with raised_together(ServerError):
        if PartialState().is_main_process:
            connect(args, config, weight_sync, least_rank, longest_request=60.0)
