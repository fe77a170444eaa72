"""A setting is declared once, as a field of a dataclass; help, ranges, choices and tables are read from there.

    dual_window: Annotated[int, COUNT] = setting(1, "Number of generation batches that δ̄ is averaged over.")

TRL and transformers declare their fields without ranges: `TRL_ALLOWED` adds what these libraries look at after the
first rollout, or never.
"""

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from importlib import import_module
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..secrets import require_open_address
from ..version import DOCS
from .paths import require_folder


# --- the numbers and the words that a setting may be


@dataclass(frozen=True)
class Range:
    """Numbers from `least`, or above `above`, to `most`; by default without a bound."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    whole: bool = False  # allow whole numbers alone
    infinite: bool = False  # allow +∞ too

    def allows(self, value: Any) -> bool:
        """Return whether the value is a number of this range."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        finite = self.infinite or number < math.inf
        return finite and self.above < number and self.least <= number <= self.most  # which NaN is not

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number" if self.infinite else "a finite number"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most}
        return ", ".join([kind, *(f"{word} {bound}" for word, bound in bounds.items() if abs(bound) < math.inf)])


COUNT = Range(least=1, whole=True)
WHOLE = Range(least=0, whole=True)
FINITE = Range()
AT_LEAST_0 = Range(least=0)
ABOVE_0 = Range(above=0)
SHARE = Range(above=0, most=1)
UNIT = Range(least=0, most=1)
PORT = Range(least=1, most=65535, whole=True)
SEED = Range(least=0, most=2**32 - 1, whole=True)


def require_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a setting whose value is none of the choices, a `Literal` or the values themselves."""
    options = get_args(choices) or tuple(choices)
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, options))}.")


def require_number(name: str, value: Any, allowed: Range) -> None:
    """Refuse a setting that is no number of its range."""
    if not allowed.allows(value):
        raise ValueError(f"{name}={value!r} is invalid: use {allowed}.")


def require_numbers(settings: Any, allowed: Mapping[str, Range]) -> None:
    """Refuse attributes of an object that are out of their ranges, which are given by name; None is passed over."""
    for name, range_ in allowed.items():
        if (value := getattr(settings, name)) is not None:
            require_number(name, value, range_)


# --- the fields


# What fields of TRL and transformers may be that a run would otherwise meet once its engine is up, or never.
TRL_ALLOWED: dict[str, Range | tuple[Any, ...]] = {
    **dict.fromkeys(("max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps"), COUNT),
    **dict.fromkeys(("num_iterations", "vllm_max_model_length", "save_total_limit", "lora_r"), COUNT),
    **dict.fromkeys(("steps_per_generation", "vllm_tensor_parallel_size"), COUNT),
    **dict.fromkeys(("vllm_server_port", "vllm_group_port"), PORT),
    **dict.fromkeys(("learning_rate", "weight_decay", "beta", "neftune_noise_alpha", "adam_epsilon"), AT_LEAST_0),
    **dict.fromkeys(("num_train_epochs", "vllm_server_timeout"), AT_LEAST_0),
    **dict.fromkeys(("max_grad_norm", "epsilon_high", "delta"), Range(least=0, infinite=True)),  # ∞: no bound
    **dict.fromkeys(("adam_beta1", "adam_beta2", "min_p", "top_entropy_quantile", "lora_dropout"), UNIT),
    **dict.fromkeys(("temperature", "repetition_penalty"), ABOVE_0),
    "top_k": Range(least=-1, whole=True),
    **dict.fromkeys(("seed", "data_seed"), SEED),
    "dataloader_num_workers": WHOLE,
    **dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), SHARE),
    "num_generations": Range(least=2, whole=True),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# What values of fields of these types may be, and how a refusal says it. A parser reads `true` as a word of its own.
_OF_TYPES: dict[Any, tuple[str, Any]] = {
    str: ("text", (str, os.PathLike, bool)),
    bool: ("True or False", bool),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    list: ("a list", (list, tuple)),
    NoneType: ("None", NoneType),
}


def setting(default: Any, meaning: str) -> Any:
    """Declare a field of a dataclass with its default, of which each instance has a copy, and its help."""
    metadata = {"help": meaning.replace("docs/", f"{DOCS}/")}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


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


def allowed_of(settings: type) -> dict[str, Any]:
    """Return what the fields of a dataclass may be, by name: a `Range` of numbers, a tuple of choices, or `bool`."""
    hints = get_type_hints(settings, include_extras=True)
    found: dict[str, Any] = {name: allowed for name, allowed in TRL_ALLOWED.items() if name in hints}
    for name, hint in hints.items():
        for part in (hint, *get_args(hint)):
            if isinstance(part, Range) or hint is bool:
                found[name] = part
            elif get_origin(part) is Literal:
                found[name] = get_args(part)
            elif isinstance(part, type) and issubclass(part, Enum):
                found[name] = tuple(each.value for each in part)
    return found


def require_fields(settings: Any, of: type | None = None) -> None:
    """Refuse a value that its field does not take: of another type or out of range, None without such a default.

    An address with a password is refused in any field.

    Args:
        settings: an instance of a dataclass, as its user has filled it.
        of: a dataclass; only its fields are looked at. By default all fields of `settings` are.

    Raises:
        ValueError: names the field, its value and what to write.
    """
    for declared in fields(settings):
        if declared.name.endswith(("_url", "_urls")):
            value = getattr(settings, declared.name) or []
            for url in [value] if isinstance(value, str) else value:
                require_open_address(url, declared.name)
    allowed, hints = allowed_of(type(settings)), get_type_hints(type(settings), include_extras=True)
    left_open = {declared.name for declared in fields(settings) if declared_default(declared) is None}
    own = own_fields(type(settings))
    for name in (declared.name for declared in fields(of or settings)):
        value = getattr(settings, name)
        if name.endswith("_dir") and isinstance(value, str | os.PathLike):
            require_folder(name, value)
        if value is None and name in left_open:
            continue
        if name.endswith("_kwargs") or (name.endswith("_config") and str(value).startswith("{")):
            _require_object(name, value)
        elif name not in allowed:
            if value is not None or name in own:  # TrlParser leaves some of TRL's empty
                # Of one name of modules TRL's own dataclass makes a text, which PEFT takes.
                _require_type(name, value, hints[name] | str if name.startswith("lora_target") else hints[name])
        elif isinstance(allowed[name], Range):
            require_number(name, value, allowed[name])
        elif allowed[name] is not bool:
            require_choice(name, value, allowed[name])
        elif not isinstance(value, bool | None):  # a word is true in Python
            raise ValueError(f"{name}={value!r} is invalid: use True or False.")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of which a value may have one."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind of `_OF_TYPES`; a truth value, in Python a number too, is none there."""
    return isinstance(value, _OF_TYPES[kind][1]) and not (isinstance(value, bool) and kind in (int, float))


def _require_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value of another type than a field of text, truth values, numbers or lists of them declares."""
    kinds = [get_origin(part) or part for part in kinds_of(hint)]
    if all(kind in _OF_TYPES for kind in kinds) and not any(_is_of(value, kind) for kind in kinds):
        wanted = " or ".join(_OF_TYPES[kind][0] for kind in kinds)
        raise ValueError(f"{name}={value!r} has the type {type(value).__name__}: use {wanted}.")


def _require_object(name: str, value: Any) -> None:
    """Refuse what is neither a dictionary nor, as a command line gives it, one in JSON."""
    found = value
    if isinstance(value, str):
        with suppress(ValueError):
            found = json.loads(value)
    if not isinstance(found, dict):
        raise ValueError(f"{name}={value!r} is invalid: use a dictionary, in JSON as '{{\"name\": 1}}'.")


@contextmanager
def values_named(settings: Any) -> Iterator[None]:
    """Put fields with their values before the message of a `ValueError` of another library that mentions them."""
    try:
        yield
    except ValueError as error:
        words = re.findall(r"\w+", str(error))
        named = [
            f"{field.name}={getattr(settings, field.name)!r}" for field in fields(settings) if field.name in words
        ]
        raise ValueError(f"{', '.join(named)}: {' '.join(str(error).split())}".removeprefix(": ")) from error


# --- functions of a user's own that a setting names: a reward, a form of the constraint, a correction


def import_function(setting: str, module: str, function: str, remedy: str) -> Callable[..., Any]:
    """Return a function of a module that Python can import.

    Raises:
        ValueError: there is no such module or function; the message begins with `setting` and ends with `remedy`.
    """
    try:
        found = getattr(import_module(module), function, None)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{setting}: the module {module!r} cannot be imported ({error}): {remedy}.") from error
    if not callable(found):
        raise ValueError(f"{setting}: {module} has no function {function!r}: {remedy}.")
    return found


def resolve(field: str, name: str, registered: Mapping[str, Callable[..., Any]], **arguments: Any) -> Any:
    """Return the function that a setting names: a registered one, or `module:function` of the user's.

    Raises:
        ValueError: the name is unknown, or the function cannot be called with the sampled tokens and `arguments`.
    """
    module, colon, function_name = name.rpartition(":")
    if not colon and name not in registered:
        names = ", ".join(map(repr, registered))
        raise ValueError(f"{field}={name!r} is unknown: choose one of {names}, or name a function, 'module:function'.")
    remedy = "correct the name, or install the module"
    function = import_function(f"{field}={name!r}", module, function_name, remedy) if colon else registered[name]
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ValueError(
            f"{field}={name!r} is called as {function_name}({', '.join(['tokens', *arguments])}), which it does not "
            f"take ({error}): give it these parameters, or leave their settings out."
        ) from error
    return function
