"""The settings of a run as it records them: what differs from the defaults, without secrets."""

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import Any

from ..secrets import hide_in_options, is_secret_name, without_secrets
from ..settings.fields import declared_default
from ..settings.recipes import RECIPES


# TrainingArguments fills the first three in itself, and a resumed run may have the other two otherwise.
_LEFT_OUT = {"disable_tqdm", "dataloader_pin_memory", "pad_to_multiple_of", "eval_on_start", "resume_from_checkpoint"}
_EMPTY: tuple[Any, ...] = (None, "", "none", [], {})


def changed_settings(config: Any, defaults: type | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values without secrets.

    Fields and dict entries whose names mean tokens, keys or passwords are left out; strings lose what looks like a
    token, and URLs lose user and query.

    Args:
        config: an instance of a dataclass.
        defaults: a dataclass whose defaults are used where it has the field; by default the instance's own class.
    """
    standard = {f.name: f for f in fields(config)} | ({f.name: f for f in fields(defaults)} if defaults else {})
    changed = {}
    for name in (f.name for f in fields(config) if f.init and f.name not in _LEFT_OUT):
        value, default = json_value(getattr(config, name)), json_value(default_of(standard[name]))
        if not is_secret_name(name) and value != default and not (value in _EMPTY and default in _EMPTY):
            changed[name] = value
    return changed


def default_of(of: Field) -> Any:
    """Return the default of a field, which for a field that is left open is the recipe's; None where it has none."""
    if of.default is None and of.name in RECIPES["trl"]:
        return RECIPES["trl"][of.name]
    return declared_default(of)


def json_value(value: Any) -> Any:
    """Return the value as JSON represents it, without secrets."""
    if isinstance(value, Enum):
        return json_value(value.value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): json_value(v) for k, v in value.items() if not is_secret_name(str(k))}
    if isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value):
            return hide_in_options(value)  # in command-line options the secret is the word after the name
        return [json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_value(item) for item in value), key=str)
    if is_dataclass(value) and not isinstance(value, type):
        return changed_settings(value)
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return without_secrets(str(value))
