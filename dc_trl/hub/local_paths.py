"""Rewrites the texts that a push sends so that they do not name directories of this machine.

Configurations, settings and logs keep the paths that a run needs. In the copy that is sent, only the last part of an
absolute path is left. All other files are sent unchanged.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ..files import read_text


ADAPTER_FILE = "adapter_config.json"
_BASE = "base_model_name_or_path"
# Files of a tokenizer and of shards, which hold words and names of tensors.
_WORDS = {
    *("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"),
    "model.safetensors.index.json",
}
# A model in the cache of the Hub's client.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+?)(?=/|$)")
# An absolute path of two parts or more within a text, but not within a URL.
_PATH = re.compile(r"(?:file://|(?<![\w:/.]))(?:/[^\s/'\"`,;:()<>\[\]{}|\\]+){2,}")


def shared_text(path: Path, base_model: str | None) -> str | None:
    """Return the text of a file without directories of this machine; None if the file can be sent as it is.

    Args:
        path: any file of a run or of a checkpoint.
        base_model: Hub id of the model that an adapter adapts, if the adapter names a directory.

    Raises:
        ValueError: the file is not the text or the JSON that its name promises; the message names it.
    """
    if path.suffix not in (".md", ".json", ".jsonl") or path.name in _WORDS:
        return None
    text = read_text(path)
    if path.suffix == ".md":
        shared = _PATH.sub(lambda match: _named(match[0]) if _is_here(match[0]) else match[0], text)
        return None if shared == text else shared
    documents = text.splitlines(keepends=True) if path.suffix == ".jsonl" else [text]
    parts = []
    for document in documents:
        try:
            value: Any = json.loads(document) if document.strip() else None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}): repair or remove it.") from error
        part = _without_paths(value)
        if path.name == ADAPTER_FILE and (base := value.get(_BASE)) and is_directory(base):  # also a relative one
            part[_BASE] = base_model or _named(base)
        indent = 2 if path.suffix == ".json" else None
        parts.append(document if part == value else json.dumps(part, indent=indent, ensure_ascii=False) + "\n")
    return None if parts == documents else "".join(parts)


def local_base(folder: Path) -> str | None:
    """Return the base of an adapter in a folder if it is a directory whose Hub id is unknown."""
    path = folder / ADAPTER_FILE
    base = json.loads(read_text(path)).get(_BASE) if path.is_file() else None
    return base if base and is_directory(base) and hub_id_of(base) is None else None


def hub_id_of(path: str) -> str | None:
    """Return the Hub id of a model in the cache of the Hub's client; None for other paths."""
    match = _CACHED.search(path)
    return None if match is None else f"{match[1]}/{match[2]}"


def is_directory(name: str) -> bool:
    """Return whether the name of a model is an absolute or relative path, which no Hub id is."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or Path(name).is_dir()


def _without_paths(value: Any) -> Any:
    match value:
        case dict():
            return {_without_paths(key): _without_paths(each) for key, each in value.items()}
        case list():
            return [_without_paths(each) for each in value]
        case str() if os.path.isabs(value) and "\n" not in value and len(Path(value).parts) > 2:
            return _named(value)
        case str():
            return _PATH.sub(lambda match: _named(match[0]), value)
    return value


def _named(path: str) -> str:
    return hub_id_of(path) or Path(path).name


def _is_here(path: str) -> bool:
    """Return whether a path in prose exists on this machine; it may be one of a server's interface."""
    return os.path.lexists(Path(*Path(path.removeprefix("file://")).parts[:3]))
