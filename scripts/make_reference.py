"""Writes docs/configuration.md and docs/api.md from the code: every setting, and every public name.

    python scripts/make_reference.py           # writes them
    python scripts/make_reference.py --check   # only says whether they are up to date

What a value may be is not copied from the source but asked of it: each error in configuration.md was raised for it.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from trl import GRPOConfig

import dc_trl
import dc_trl.config
from dc_trl import DCGRPOConfig
from dc_trl.training.arguments import ARGUMENTS


ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WIDTH = 120
MADE = "<!-- Made by scripts/make_reference.py from the code: change that, then run `make reference`. -->"

# Groups by the beginning of a field's name; the last one takes what is left.
GROUPS = {
    "The constraint": ("constraint", "discrepancy_", "batch_reduction"),
    "The multiplier λ": ("lambda_", "dual_"),
    "Deployment and weights": ("deployment_", "weight_sync"),
    "The vLLM server": ("vllm_",),
    "Advantages and loss": ("advantage_", "drop_"),
    "The Hub": ("hub_",),
    "Other": ("",),
}

# Settings that contradict each other, one for each check of `DCGRPOConfig`.
CONTRADICTIONS: list[dict[str, Any]] = [
    {"output_dir": ""},
    {"lambda_min": 0.5, "lambda_max": 0.2},
    {"lambda_init": 2.0},
    {"fp16": True},
    {"constraint": "none", "discrepancy_margin": 0.01},
    {"constraint": "static", "dual_window": 4},
    {"weight_sync": "checkpoint"},
    {"weight_sync": "nccl", "weight_sync_dir": "/mnt/shared", "use_vllm": True, "vllm_mode": "server"},
    {"weight_sync": "nccl", "use_vllm": True, "vllm_mode": "colocate"},
    {"hub_deployment": "repository"},
    {"deployment_scheme": "fp8", "use_transformers_continuous_batching": True},
    {"use_transformers_continuous_batching": True},
    {"top_p": 0.9},
    {"generation_kwargs": {"temperature": 0.7}},
    {"vllm_structured_outputs_regex": "[0-9]+", "use_vllm": True},
    {"vllm_importance_sampling_correction": True},
    {"importance_sampling_level": "sequence"},
    {"off_policy_mask_threshold": 0.01},
    {"vllm_importance_sampling_correction": True, "use_vllm": True},
    {"advantage_estimator": "rloo", "scale_rewards": "batch"},
    {"temperature": 0.0},
]


# --- what a field says of itself


def described_fields(config: type) -> dict[str, tuple[str, str]]:
    """Name → (type, meaning) from the `Args:` of a docstring in Hugging Face's style."""
    arguments = inspect.getdoc(config).split("Args:\n", 1)[1]
    entries = re.findall(r"^ {4}(\w+) \(`([^`]+)`.*\):\n((?: {8}.*\n?)+)", arguments, re.MULTILINE)
    return {name: (kind, " ".join(meaning.split())) for name, kind, meaning in entries}


def type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "str"
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(type_name(part) for part in get_args(annotation) if part is not NoneType)
    return str(annotation) if get_args(annotation) else annotation.__name__


def default(field: dataclasses.Field) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "unset" if value is None else f"`{shown(value)}`"


def shown(value: Any) -> str:
    return repr(value).replace("'", '"')


def refusal(**settings: Any) -> tuple[str, int]:
    """The error that settings raise, and the line of dc_trl/config.py that it comes from (0: another file's)."""
    try:
        fixed = {"output_dir": "runs/reference", "use_cpu": True, "bf16": False, "report_to": "none"}
        DCGRPOConfig(**(fixed | settings))
    except ValueError as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        own = trace.tb_frame.f_code.co_filename == dc_trl.config.__file__
        return str(error), trace.tb_lineno if own else 0
    return "", 0


def refused_value(field: dataclasses.Field) -> tuple[str, int]:
    """The error for a value of a field that is wrong whatever the others are; nothing if there is none."""
    wrong: Any = -1 if field.type in (int, float, float | None) else "unknown"
    message, line = refusal(**{"use_vllm": True, field.name: wrong})
    return (message, line) if message.startswith(f"{field.name}={wrong!r}") else ("", 0)


def unexplained_checks() -> list[int]:
    """Lines of dc_trl/config.py that raise an error which is not on the page."""
    tree = ast.parse(Path(dc_trl.config.__file__).read_text())
    raising = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    raised = {refused_value(field)[1] for field in own_fields()}
    raised |= {refusal(**settings)[1] for settings in CONTRADICTIONS}
    return sorted(raising - raised)


def own_fields() -> list[dataclasses.Field]:
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    return [field for field in dataclasses.fields(DCGRPOConfig) if field.name not in theirs]


# --- the pages


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def field_section(field: dataclasses.Field, described: dict[str, tuple[str, str]]) -> str:
    kind, meaning = described[field.name]
    facts = f"`{kind}`, default {default(field)}"
    parts = [f"### `{field.name}`", facts, paragraph(meaning)]
    if get_origin(field.type) is Literal:
        parts[1] += "; one of " + ", ".join(f"`{shown(option)}`" for option in get_args(field.type))
    elif message := refused_value(field)[0]:
        parts.append(f"Refused otherwise: `{message}`")
    return "\n\n".join(parts)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def replaced_defaults() -> str:
    theirs = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    rows = [
        [f"`{name}`", default(field), default(theirs[name]), str(field.metadata["help"])]
        for name, field in DCGRPOConfig.__dataclass_fields__.items()
        if name in theirs and name in DCGRPOConfig.__annotations__
    ]
    return table(["field", "here", "TRL", ""], rows)


def options_of(config: type) -> str:
    rows = [
        [f"`{field.name}`", f"`{type_name(field.type)}`", default(field), str(field.metadata["help"])]
        for field in dataclasses.fields(config)
    ]
    return table(["field", "type", "default", ""], rows)


def configuration() -> str:
    described = described_fields(DCGRPOConfig)
    parts = [
        "# Configuration",
        MADE,
        paragraph(
            "Every field of `DCGRPOConfig` that TRL's `GRPOConfig` does not have or states otherwise, then the fields "
            "of `scripts/train.py`. Each may stand in a YAML file (`--config`), on the command line (`--field value`, "
            "which wins), and, for the trainer's, in Python: `DCGRPOConfig(output_dir, field=value)`. All others are "
            "those of TRL's [`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer) and `ModelConfig`; "
            "`python scripts/train.py --help` lists them all."
        ),
    ]
    left = own_fields()
    for title, beginnings in GROUPS.items():
        group = [field for field in left if field.name.startswith(beginnings)]
        left = [field for field in left if field not in group]
        if group:
            parts += [f"## {title}", *(field_section(field, described) for field in group)]
    parts += [
        "## Defaults that the paper's objective asks for",
        paragraph(
            "Fields of TRL that `DCGRPOConfig` states anew, so that a TRL that changes its own does not change the "
            "recipe."
        ),
        replaced_defaults(),
        "## What contradicts each other",
        "Refused when the configuration is made, before a model is loaded:",
    ]
    for settings in CONTRADICTIONS:
        message, _ = refusal(**settings)
        given = ", ".join(f"{name}={shown(value)}" for name, value in settings.items())
        parts += [f"- `{given}`: {message}"]
    for config in ARGUMENTS:
        if config is DCGRPOConfig or config.__module__.startswith("trl"):
            continue
        parts += [f"## `scripts/train.py`: {inspect.getdoc(config).splitlines()[0].rstrip('.')}", options_of(config)]
    return "\n\n".join(parts) + "\n"


def api() -> str:
    rows = []
    for name in dc_trl.__all__:
        value = getattr(dc_trl, name)
        if not isinstance(value, str):
            summary = inspect.getdoc(value).split("\n\n")[0]
            summary = re.sub(r"\[`~?([^`]+)`\]", r"`\1`", " ".join(summary.split())).replace("``", "`")
            rows.append([f"`{name}`", summary])
    parts = [
        "# Python reference",
        MADE,
        paragraph(
            "What `from dc_trl import …` gives. Other modules are documented in their source, and may change between "
            "two versions."
        ),
        table(["name", ""], rows),
        "```{eval-rst}\n.. automodule:: dc_trl\n   :members:\n   :member-order: groupwise\n```",
    ]
    return "\n\n".join(parts) + "\n"


PAGES = {"configuration.md": configuration, "api.md": api}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is out of date")
    args = parser.parse_args()
    if lines := unexplained_checks():
        sys.exit(f"error: dc_trl/config.py, lines {lines}: errors without an example in CONTRADICTIONS; add one each.")
    for name, make in PAGES.items():
        text = make()
        if not args.check:
            DOCS.joinpath(name).write_text(text)
        elif DOCS.joinpath(name).read_text() != text:
            sys.exit(f"error: docs/{name} is out of date: run `make reference`.")


if __name__ == "__main__":
    main()
