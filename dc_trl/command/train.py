"""Trains a policy with DC-GRPO.

    dc-trl train --config quickstart
    dc-trl train --config my_run.yaml --learning_rate 2e-6 --seed 1

A configuration is a YAML file of the fields below, or the name of one that ships. Each field can be given on the
command line too, where it overrides the file. Several processes: `accelerate launch -m dc_trl train --config FILE`.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

from ..constraint.settings import ConstraintSettings
from ..serving.errors import ServerError
from ..settings.command_line import described, kind_and_choices, refused_in_one_line
from ..settings.fields import declared_default
from ..settings.trainer_fields import TrainerFields
from .own_arguments import DataArguments, ServerArguments, WatchArguments


if TYPE_CHECKING:
    from transformers import TrainerCallback

    from ..trainer import DCGRPOTrainer
    from .arguments import ConfigurationParser
    from .finish import Outcome


def train(
    words: Sequence[str] | None = None, callback: Callable[[DCGRPOTrainer], TrainerCallback] | None = None
) -> Outcome:
    """Train as a command line says, by default that of the process; return the same as `run`.

    Args:
        words: words of the command line.
        callback: function that makes a further callback for the trainer.
    """
    given = sys.argv[1:] if words is None else [*words]
    if not given:
        sys.exit("error: no setting is given: name a configuration by --config; dc-trl train --help lists the fields.")
    if given[-1] in ("-h", "--help"):
        print(short_help(max(shutil.get_terminal_size((120, 24)).columns, 80)))
        sys.exit(0)
    from ..run.interruption import StopSignals  # these take seconds, for which a help need not wait
    from .arguments import RunArguments

    sys.path.append(os.getcwd())  # the user's own reward functions are here
    with StopSignals() as signals, ExitStack() as stack:
        with refused_in_one_line(TypeError, ServerError):
            arguments = RunArguments.parse(given)
            from .build import build_trainer  # takes seconds more, for which a refusal need not wait
            from .finish import run

            trainer, alarm = build_trainer(arguments, stack)
        if callback is not None:
            trainer.add_callback(callback(trainer))
        return run(trainer, alarm, arguments.data, signals, stack)


def make_parser() -> ConfigurationParser:
    """Return the parser of all settings."""
    from .arguments import ConfigurationParser

    return ConfigurationParser()


main = train


# --- what --help shows, without TRL, whose import takes ten seconds


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
