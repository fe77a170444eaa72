"""Describes a run before it trains: model, sampling, constraint, data and output."""

from pathlib import Path

from peft import LoraConfig, PeftModel

from ..callbacks.summary import reward_weights
from ..config import DCGRPOConfig
from ..records.tables import weighted_sum
from ..settings.secrets import without_secrets
from ..trainer import DCGRPOTrainer
from .arguments import RunArguments


def banner(trainer: DCGRPOTrainer, arguments: RunArguments) -> str:
    """Return at most nine lines without tokens and keys; lines that do not apply are omitted."""
    args = trainer.args
    lines = {
        "model": _model(trainer, arguments),
        "sampling": _engine(args, own_server=arguments.server.serve is not None),
        "constraint": _constraint(args),
        "correction": _correction(args),
        "rewards": weighted_sum(reward_weights(trainer)),
        "training": _training(trainer, arguments),
        "held out": _held_out(trainer),
        "output": without_secrets(str(Path(args.output_dir).absolute())),
    }
    return "DC-GRPO\n" + "\n".join(f"  {name:<12}{text}" for name, text in lines.items() if text)


def _model(trainer: DCGRPOTrainer, arguments: RunArguments) -> str:
    model = arguments.model
    name = without_secrets(model.model_name_or_path or "")
    revision = "" if model.model_revision == "main" else f", revision {model.model_revision}"
    adapter = ""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(policy, PeftModel):
        config, source = policy.active_peft_config, arguments.adapter.adapter_name_or_path
        adapter = f", LoRA of rank {config.r}" if isinstance(config, LoraConfig) else f", {config.peft_type.value}"
        adapter += "" if source is None else f", continued from {without_secrets(source)}"
    return f"{name}{revision}{adapter}"


def _engine(args: DCGRPOConfig, own_server: bool) -> str:
    scheme = args.deployment_scheme
    if not args.use_vllm:
        return f"{scheme} replica of the policy, in this process" if scheme else "model.generate, no deployment scheme"
    how = scheme or "no deployment scheme"
    if args.vllm_mode == "colocate":
        return f"vLLM in this process (colocate), {how}"
    one = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    urls = [without_secrets(url) for url in args.vllm_server_base_urls or [one]]
    of = "vLLM server of this run" if own_server else "vLLM server" if len(urls) == 1 else f"{len(urls)} vLLM servers"
    return f"{of}, {how}: {', '.join(urls)}"


def _constraint(args: DCGRPOConfig) -> str:
    if args.constraint == "none":
        # Otherwise model.generate samples, which returns no log-probabilities.
        measured = args.use_vllm or args.deployment_scheme is not None
        return f"none: the mismatch is {'measured' if measured else 'not measured (deployment_scheme=bf16 does)'}"
    if args.constraint == "static":
        return f"static, λ = {args.lambda_init:g}"
    tolerance = args.discrepancy_tolerance
    epsilon = "auto (found by the run)" if tolerance == "auto" else f"{tolerance:g}"
    return f"lagrangian, ε = {epsilon}, λ from {args.lambda_init:g}"


def _correction(args: DCGRPOConfig) -> str:
    if args.rollout_correction != "none":
        return f"rollout_correction {args.rollout_correction}"
    if args.use_vllm and args.vllm_importance_sampling_correction:
        return f"TRL's importance sampling, {args.vllm_importance_sampling_mode}"
    return ""


def _training(trainer: DCGRPOTrainer, arguments: RunArguments) -> str:
    args = trainer.args
    length = f"{args.max_steps} step(s)" if args.max_steps > 0 else f"{args.num_train_epochs:g} epoch(s)"
    resumed = "" if args.resume_from_checkpoint is None else f", resumed from {Path(args.resume_from_checkpoint).name}"
    processes = f", {args.world_size} processes" if args.world_size > 1 else ""
    name = without_secrets(arguments.data.dataset_name or "")
    return f"{length} on {len(trainer.train_dataset):,} problems of {name}{processes}{resumed}"


def _held_out(trainer: DCGRPOTrainer) -> str:
    if trainer.eval_dataset is None:
        return "nothing (eval_size=0)"
    return f"{len(trainer.eval_dataset):,} problems, measured before and after training"
