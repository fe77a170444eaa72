"""What a push sends in place of texts that name directories of this machine.

Configurations, settings and logs keep the paths that a run needs, and are sent without them: of a path its last part
is left. Everything else is sent as it lies in the folder.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..files import read_text


ADAPTER_FILE = "adapter_config.json"
_BASE = "base_model_name_or_path"
# Files of a tokenizer and of shards, which hold words and names of tensors.
_WORDS = (
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
)
# Where the Hub's client keeps what it has fetched.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+?)(?=/|$)")
# An absolute path of two parts or more within a text, and not of a URL.
_PATH = re.compile(r"(?:file://|(?<![\w:/.]))(?:/[^\s/'\"`,;:()<>\[\]{}|\\]+){2,}")


@contextmanager
def without_local_paths(folder: Path, files: Iterable[str], base_model: str | None) -> Iterator[Path]:
    """A folder to push these files from: the folder itself where they name no directory, or a copy of it in links.

    Args:
        folder, files: the files' names are relative to the folder.
        base_model: Hub id of the model that an adapter adapts, where the adapter names a directory.
    """
    files = list(files)
    texts = {name: text for name in files if (text := shared_text(folder / name, base_model)) is not None}
    if not texts:
        yield folder
        return
    with TemporaryDirectory(prefix="dc_trl-push-") as copy:
        for name in files:
            target = Path(copy, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in texts:
                target.write_text(texts[name])
            else:
                target.symlink_to((folder / name).resolve())
        yield Path(copy)


def shared_text(path: Path, base_model: str | None) -> str | None:
    """The text of a file without directories of this machine; None where it may go as it is."""
    if path.suffix == ".md":
        text = read_text(path)
        shared = _PATH.sub(lambda match: _named(match[0]) if _is_here(match[0]) else match[0], text)
    elif path.suffix in (".json", ".jsonl") and path.name not in _WORDS:
        text = read_text(path)
        shared = _shared_json(path, text, base_model)
    else:
        return None
    return None if shared == text else shared


def local_base(folder: Path) -> str | None:
    """The base of an adapter in a folder, where it is a directory and nothing tells its Hub id."""
    path = folder / ADAPTER_FILE
    base = json.loads(read_text(path)).get(_BASE) if path.is_file() else None
    return base if base and is_directory(base) and hub_id_of(base) is None else None


def hub_id_of(path: str) -> str | None:
    """The Hub id of a model in the cache of the Hub's client; None for other paths."""
    match = _CACHED.search(path)
    return None if match is None else f"{match[1]}/{match[2]}"


def _shared_json(path: Path, text: str, base_model: str | None) -> str:
    try:
        if path.suffix == ".jsonl":
            return "\n".join(map(_shared_line, text.splitlines())) + "\n" * text.endswith("\n")
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): repair or remove it, a push would send it unread.") from error
    shared = value
    if path.name == ADAPTER_FILE and isinstance(value, dict) and is_directory(value.get(_BASE) or ""):
        shared = value | {_BASE: base_model or hub_id_of(value[_BASE]) or Path(value[_BASE]).name}
    shared = _without_paths(shared)
    return text if shared == value else json.dumps(shared, indent=2, ensure_ascii=False) + "\n"


def _shared_line(line: str) -> str:
    value = json.loads(line) if line.strip() else None
    shared = _without_paths(value)
    return line if shared == value else json.dumps(shared, ensure_ascii=False)


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
    """Whether a path in prose is one of this machine, and not of a server's interface."""
    return os.path.lexists(Path(*Path(path.removeprefix("file://")).parts[:3]))


def is_directory(name: str) -> bool:
    """Whether a model's name is a path, relative ones too: a Hub id is no path."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or Path(name).is_dir()
