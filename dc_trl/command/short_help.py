"""What `dc-trl train --help` shows. It is read from the source: to import TRL takes ten seconds."""

import ast
import re
import textwrap

from ..settings.command_line import described
from ..settings.paths import PACKAGE


# Where our fields and their choices are declared; a dataclass comes after those that it extends.
_SOURCES = ("settings/recipes", "constraint/settings", "config", "command/data_arguments", "command/arguments")
_METAVARS = {"bool": "BOOL", "int": "INT", "float": "FLOAT"}
_USAGE = "usage: dc-trl train --config NAME_OR_FILE [--field value ...]"

# What is shown: our own fields, and those of TRL and transformers that nearly every run sets. The name of a dataclass
# stands for those of its own fields that are not named here.
_GROUPS = {
    "the model": "model_name_or_path dtype attn_implementation trust_remote_code use_peft lora_r lora_alpha "
    "lora_target_modules",
    "the data": "dataset_name rewards DataArguments",
    "the method": "recipe beta num_iterations DCGRPOConfig",
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
    choices: dict[str, tuple] = {}  # of an alias of a `Literal`
    own: dict[str, dict[str, str]] = {}  # by dataclass and field
    for source in _SOURCES:
        for node in ast.parse((PACKAGE / f"{source}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields = [
                    field for field in node.body if isinstance(field, ast.AnnAssign) and _is_setting(field.value)
                ]
                inherited = {
                    name: line for base in node.bases for name, line in own.get(ast.unparse(base), {}).items()
                }
                own[node.name] = inherited | {ast.unparse(each.target): _line(each, choices, width) for each in fields}
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                choices[ast.unparse(node.targets[0])] = _literals(node.value)
    lines = {name: line for of in own.values() for name, line in of.items()}
    named = {word for words in _GROUPS.values() for word in words.split()}
    shown = [_USAGE, described("config", "TEXT", "YAML file of the fields below, or the name of a shipped one", width)]
    for title, words in _GROUPS.items():
        shown += ["", f"{title}:"]
        for word in words.split():
            shown += [line for name, line in own.get(word, {}).items() if name not in named]
            shown += [lines[word]] if word in lines else []
        others = " ".join(f"--{word}" for word in words.split() if word not in own and word not in lines)
        if others:
            shown.append(textwrap.fill(f"  of TRL: {others}", width, subsequent_indent="    ", break_on_hyphens=False))
    return "\n".join([*shown, "", "--help NAME describes a field, --help all describes all, those of TRL too."])


def _is_setting(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "setting"


def _literals(value: ast.expr) -> tuple:
    """Return the values of the first `Literal` in an annotation."""
    found = next(
        each for each in ast.walk(value) if isinstance(each, ast.Subscript) and "Literal" in ast.unparse(each.value)
    )
    values = ast.literal_eval(found.slice)
    return values if isinstance(values, tuple) else (values,)


def _line(field: ast.AnnAssign, choices: dict[str, tuple], width: int) -> str:
    words = re.findall(r"\w+", ast.unparse(field.annotation))
    assert isinstance(field.value, ast.Call)
    default, meaning = map(ast.literal_eval, field.value.args)
    own = _literals(field.annotation) if "Literal" in words else next((choices[w] for w in words if w in choices), ())
    kind = next((shown for word, shown in _METAVARS.items() if word in words), "TEXT")
    return described(ast.unparse(field.target), kind, meaning, width, own, default)
