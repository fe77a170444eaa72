"""The manifest of a checkpoint: sizes and hashes of its files. It is written last and marks a complete checkpoint."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..files import sync_to_disk, write_bytes
from ..records.runs import DEPLOYMENT_FOLDER


MANIFEST_FILE = "manifest.json"
_BLOCK = 1 << 22  # bytes read and hashed at a time
_THREADS = 8  # hashing releases Python's lock


def files_of(folder: Path) -> list[Path]:
    """Return the files that resuming reads, without the deployment checkpoint and remains of an unfinished one."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path != folder / MANIFEST_FILE
        and not any(part == DEPLOYMENT_FOLDER or part.startswith(".") for part in path.relative_to(folder).parts[:-1])
    ]


def write_manifest(folder: Path, hashes: bool) -> None:
    """Write the manifest of a checkpoint, and return once checkpoint and manifest are on the disk.

    Args:
        folder: directory of the checkpoint, all of whose files are written.
        hashes: whether the manifest has SHA-256 hashes beside sizes.

    Raises:
        OSError: the file system refused.
    """
    files = files_of(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(sync_to_disk, files))
        digests = list(pool.map(_digest, files)) if hashes else [None] * len(files)
    for inner in sorted({file.parent for file in files} | {folder}):
        sync_to_disk(inner)
    described: dict[str, dict[str, Any]] = {}
    for file, digest in zip(files, digests, strict=True):
        hashed = {} if digest is None else {"sha256": digest}
        described[str(file.relative_to(folder))] = {"size": file.stat().st_size, **hashed}
    text = json.dumps({"files": described}, indent=1, ensure_ascii=False) + "\n"
    write_bytes(folder / MANIFEST_FILE, text.encode(), durable=True)
    sync_to_disk(folder.parent)  # this folder holds the checkpoint's own name


def manifest_defect(folder: Path, hashes: bool) -> str | None:
    """Return what differs from a checkpoint's manifest; None if nothing does or there is no manifest.

    Files that the manifest does not list are ignored. With `hashes` every file is read, unless this process has
    already read it and its size and time are unchanged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    hashed: dict[Path, str] = {}
    try:
        for name, entry in json.loads(path.read_text(encoding="utf-8"))["files"].items():
            file, size = folder / name, int(entry["size"])
            if not file.is_file():
                return f"holds no {name}, which its {MANIFEST_FILE} lists"
            if (found := file.stat().st_size) != size:
                return f"holds {name} with {found:,} bytes in place of {size:,}: it was changed or cut short"
            if hashes and "sha256" in entry:
                hashed[file] = entry["sha256"]
    except (ValueError, TypeError, LookupError, AttributeError):
        return f"holds {MANIFEST_FILE}, which is not a manifest"
    with ThreadPoolExecutor(_THREADS) as pool:
        for (file, expected), digest in zip(hashed.items(), pool.map(_digest, hashed), strict=True):
            if digest != expected:
                return f"holds {file.relative_to(folder)}, whose bytes differ from those that were saved"
    return None


def _digest(file: Path) -> str:
    found = file.stat()
    return _digest_of(os.path.realpath(file), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)  # the command checks the checkpoint before the model is loaded, and the trainer again
def _digest_of(file: str, size: int, modified: int) -> str:
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
