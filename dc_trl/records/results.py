"""Results of a measurement as JSON: named tuples become objects, which are read by the types of their fields."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..files import read_object, write_text


Result = TypeVar("Result", bound=tuple)


def write_result(result: tuple, path: str | os.PathLike[str], indent: int) -> None:
    """Write a named tuple as JSON; a number that is not finite becomes null."""
    text = json.dumps(_plain(result), indent=indent, ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a broken tokenizer can produce, is not valid UTF-8.
    write_text(Path(path), text.encode(errors="replace").decode() + "\n")


def read_result(kind: type[Result], path: str | os.PathLike[str], what: str) -> Result:
    """Read what `write_result` wrote. Unknown fields are ignored.

    Args:
        kind: a named tuple of numbers, text, `Any`, lists, mappings and named tuples, each of them or None.
        path: of the file.
        what: names the expected content in the message of an error.

    Raises:
        ValueError: there is no such file, or it holds something else; the message names it.
    """
    try:
        return _typed(kind, read_object(Path(path)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no {what} ({type(error).__name__}: {error}): repair or remove it.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _typed(kind: Any, tree: Any) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:  # something, or None
        return None if tree is None else _typed(of[0], tree)
    if origin is list:
        return [_typed(of[0], item) for item in tree]
    if origin in (dict, Mapping):
        return {int(key) if of[0] is int else key: _typed(of[1], item) for key, item in tree.items()}
    if hasattr(kind, "_fields"):
        kinds = get_type_hints(kind)
        known = {name: item for name, item in tree.items() if name in kinds}  # earlier versions wrote further fields
        return kind(**{name: _typed(kinds[name], item) for name, item in known.items()})
    return tree
