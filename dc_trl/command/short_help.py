"""What `dc-trl train --help` shows, without TRL, whose import takes ten seconds."""

import textwrap
from dataclasses import fields
from typing import get_type_hints

from ..constraint.settings import ConstraintSettings
from ..settings.command_line import described, kind_and_choices
from ..settings.fields import declared_default
from ..settings.trainer_fields import TrainerFields
from .own_arguments import DataArguments, ServerArguments, WatchArguments


_OWN = (ConstraintSettings, TrainerFields, DataArguments, ServerArguments, WatchArguments)
_USAGE = "usage: dc-trl train --config NAME_OR_FILE [--field value ...]"

# What is shown: our own fields, and those of TRL and transformers that nearly every run sets. The name of a dataclass
# stands for those of its fields that are not named here.
_GROUPS = {
    "the model": "model_name_or_path dtype attn_implementation trust_remote_code use_peft lora_r lora_alpha "
    "lora_target_modules",
    "the data": "dataset_name rewards DataArguments",
    "the method": "recipe beta num_iterations ConstraintSettings TrainerFields",
    "the sampler": "deployment_scheme num_generations max_completion_length temperature top_p use_vllm vllm_mode "
    "vllm_server_base_url vllm_server_base_urls vllm_gpu_memory_utilization vllm_max_model_length weight_sync "
    "weight_sync_dir weight_sync_steps rollout_overlap vllm_request_timeout vllm_max_retries routing_replay "
    "ServerArguments",
    "the training": "learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm max_steps "
    "num_train_epochs per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing bf16 use_cpu "
    "seed length_aware_batches WatchArguments",
    "the output": "output_dir resume_from_checkpoint save_strategy save_steps save_total_limit logging_steps "
    "report_to eval_strategy eval_steps per_device_eval_batch_size export_run push_to_hub hub_model_id "
    "hub_base_model_id",
}


def short_help(width: int) -> str:
    """Return our own fields by their first sentences, and the names of those of TRL, in groups.

    Args:
        width: columns of the terminal.
    """
    own = {each.__name__: each for each in _OWN}
    lines = {}
    for settings in _OWN:
        hints = get_type_hints(settings)
        for field in fields(settings):
            kind, choices = kind_and_choices(hints[field.name])
            meaning, default = field.metadata["help"], declared_default(field)
            lines[field.name] = described(field.name, kind, meaning, width, choices, default)
    named = {word for words in _GROUPS.values() for word in words.split()}
    shown = [_USAGE, described("config", str, "YAML file of the fields below, or the name of a shipped one", width)]
    for title, words in _GROUPS.items():
        shown += ["", f"{title}:"]
        for word in words.split():
            names = [field.name for field in fields(own[word]) if field.name not in named] if word in own else [word]
            shown += [lines[name] for name in names if name in lines]
        others = " ".join(f"--{word}" for word in words.split() if word not in own and word not in lines)
        if others:
            shown.append(textwrap.fill(f"  of TRL: {others}", width, subsequent_indent="    ", break_on_hyphens=False))
    return "\n".join([*shown, "", "--help NAME describes a field, --help all describes all, those of TRL too."])
