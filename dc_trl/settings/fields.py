"""A setting is declared once, as a field of a dataclass; help, ranges, choices and tables are read from there.

    dual_window: Annotated[int, COUNT] = setting(1, "Number of generation batches that δ̄ is averaged over.")

TRL and transformers declare their fields without ranges: `TRL_RANGES` and `TRL_CHOICES` add what these libraries look
at after the first rollout, or never.
"""

from dataclasses import MISSING, Field, field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .ranges import ABOVE_0, AT_LEAST_0, COUNT, SHARE, Range, require_choice, require_number


# Ranges of those numbers of TRL and transformers that a run would otherwise meet once its engine is up, or never.
TRL_RANGES = {
    **dict.fromkeys(("max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps"), COUNT),
    **dict.fromkeys(("num_iterations", "vllm_max_model_length", "save_total_limit", "lora_r"), COUNT),
    **dict.fromkeys(("learning_rate", "weight_decay", "beta"), AT_LEAST_0),
    **dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), SHARE),
    "temperature": ABOVE_0,
    "num_generations": Range(least=2, whole=True),
}
# Words that TRL's fields may have, which it declares as text.
TRL_CHOICES: dict[str, Any] = {
    "importance_sampling_level": Literal["token", "sequence"],
    "scale_rewards": Literal["group", "batch", "none", True, False],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "vllm_importance_sampling_mode": Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
}


def setting(default: Any, meaning: str) -> Any:
    """Declare a field of a dataclass with its default, of which each instance has a copy, and its help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


def declared_default(declared: Field) -> Any:
    """Return the default of a field; None where it has none."""
    if declared.default is not MISSING:
        return declared.default
    factory: Any = declared.default_factory
    return None if factory is MISSING else factory()


def own_fields(settings: type) -> list[str]:
    """Return the names of the fields that this package declares, those of TRL with another default included."""
    ours = [each for each in settings.__mro__ if each.__module__.startswith("dc_trl")]
    declared = {name for each in ours for name in vars(each).get("__annotations__", {})}
    return [field.name for field in fields(settings) if field.name in declared]


def kinds_of(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def ranges_of(settings: type) -> dict[str, Range]:
    """Return the range of each number among the fields of a dataclass, TRL's included."""
    hints = get_type_hints(settings, include_extras=True)
    own = {name: part for name, hint in hints.items() for part in get_args(hint) if isinstance(part, Range)}
    return {name: range_ for name, range_ in (TRL_RANGES | own).items() if name in hints}


def choices_of(settings: type) -> dict[str, tuple[Any, ...]]:
    """Return the values that each field of a dataclass may have, where they are listed."""
    hints = {name: TRL_CHOICES.get(name, hint) for name, hint in get_type_hints(settings).items()}
    literals = ((name, kind) for name, hint in hints.items() for kind in kinds_of(hint) if get_origin(kind) is Literal)
    return {name: get_args(kind) for name, kind in literals}


def require_fields(settings: Any, of: type | None = None) -> None:
    """Refuse a value that its field does not take: another choice, a number out of range, None without such a default.

    Args:
        settings: an instance of a dataclass, as its user has filled it.
        of: a dataclass; only its fields are looked at. By default all fields of `settings` are.

    Raises:
        ValueError: names the field, its value and what to write.
    """
    kind = type(settings)
    choices, ranges, hints = choices_of(kind), ranges_of(kind), get_type_hints(kind)
    left_open = {declared.name for declared in fields(kind) if declared_default(declared) is None}
    for name in (declared.name for declared in fields(of or kind)):
        value = getattr(settings, name)
        if value is None and name in left_open:
            continue
        if hints[name] is bool and not isinstance(value, bool | None):  # a word is true in Python
            raise ValueError(f"{name}={value!r} is invalid: use True or False.")
        if name in choices:
            require_choice(name, value, choices[name])
        if name in ranges:
            require_number(name, value, ranges[name])
