"""Builds what samples for a trainer: the in-process replica, or vLLM in the mode that the arguments select."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import ProcessorMixin
from trl.generation.vllm_generation import VLLMGeneration

from ..quantization.policy import base_model, require_shared_embeddings
from ..settings.neutral_sampling import (
    OUT_OF_REPLICA,
    SERVER_DEFAULTS,
    TRUNCATIONS,
    restriction_warning,
    restrictions,
    truncations,
)
from .sampler import Sampler


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
_OF_MODEL = "the model's generation_config.json"


def build_sampler(trainer: Any) -> Sampler:
    """Return what samples for a trainer: its replica, its vLLM engine or, without either, the policy itself.

    Raises:
        ValueError, ServerError: see `build_replica` and `build_vllm`.
    """
    args = trainer.args
    if trainer.use_vllm:
        engine = trainer.vllm_generation = build_vllm(trainer)
        _measure_restrictions(trainer, args.sampling)
        if args.rollout_overlap:
            from .overlap import OverlappedSampler

            return OverlappedSampler(trainer, engine, bool(args.truncations), trainer.micro_batches_per_generation)
        truncates = bool(args.truncations)
    elif args.deployment_scheme is None:
        return Sampler(trainer, None, bool(args.truncations))
    else:
        truncates = complete_generation_config(trainer)
        engine = build_replica(trainer, args.deployment_scheme)
    if not args.may_lag and args.split_by is None:
        return Sampler(trainer, engine, truncates)
    from .lagging import LaggingSampler  # in step too, where 0 says beside the lag's part that there is none

    return LaggingSampler(trainer, engine, truncates)


def _measure_restrictions(
    trainer: Any, settings: dict[str, Any], place: str = "", corrected: Collection[str] = TRUNCATIONS
) -> None:
    """Note and warn of settings with which the discrepancy that is measured contains more than the engines' mismatch.

    Raises:
        ValueError: something acts on the discrepancy.
    """
    if found := trainer.args.require_policys_distribution(settings, corrected, place):
        trainer.constraint.restrictions = trainer.constraint.restrictions | found
        logger.warning(restriction_warning(found, "leave it out, or give the value that has no effect"))


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
        ValueError: adapter, generation_config, processing class, or tools in several processes do not go with the
            engine.
        ServerError: a server cannot be reached, or does not fit.
    """
    from .rollout_ahead import OverlappedGeneration
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
    colocated = args.vllm_mode == "colocate"
    asking = args.vllm_tensor_parallel_size if colocated else trainer.accelerator.num_processes
    if trainer.tools and asking > 1:
        # TRL 1.16 divides the answers as if each process had asked for equally many (its pull request 6673).
        field = "vllm_tensor_parallel_size" if colocated else "num_processes"
        raise ValueError(
            f"{field}={asking}: in later turns of tools these processes ask one engine for different numbers of "
            "completions, and would get each other's, or wait for good: sample by the in-process replica "
            "(use_vllm=False), set 1, or leave tools and environments out."
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
        taken = {name: of_model[name] for name in left_open if of_model.get(name) is not None}
        _measure_restrictions(trainer, taken, _OF_MODEL, ())
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
        ValueError: these settings restrict sampling under a constraint, or ask for more than sampling.
    """
    config = trainer.generation_config
    config.update(**base_model(trainer.model).generation_config.to_dict(), defaults_only=True)
    config.use_cache = True  # a model's configuration may say no, and each token would read all before it again
    if config.top_k == -1:  # vLLM's value for no limit
        config.top_k = 0
    settings = {name: value for name, value in vars(config).items() if name[0] != "_"}
    alone = {name: value for name, value in settings.items() if name in OUT_OF_REPLICA}
    for name, value, remedy in restrictions(alone):
        raise ValueError(
            f"{name}={value!r} samples in a way that the in-process replica does not: {remedy} in generation_kwargs "
            "and in the model's generation_config, or sample with vLLM (use_vllm=True)."
        )
    _measure_restrictions(trainer, settings, _OF_MODEL)
    return bool(truncations(settings))
