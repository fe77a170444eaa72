"""Results of a measurement as JSON: named tuples become objects."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import write_text


def write_result(result: tuple, path: str | os.PathLike[str], indent: int) -> None:
    """Write a named tuple as JSON; a number that is not finite becomes null."""
    text = json.dumps(_plain(result), indent=indent, ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which a broken tokenizer can produce, is not valid UTF-8.
    write_text(Path(path), text.encode(errors="replace").decode() + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
