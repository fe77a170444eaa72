"""Descriptions of the sub-commands, generated from the sources and kept in the user's cache folder.

Help, refusals and reports need options, types and defaults, and the parsers that know them need torch and TRL, which
take seconds to import. A description is therefore kept in a file, and generated again once a source file of this
package or the version of a library has changed. Where the folder cannot be written, it is generated each time.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .paths import PACKAGE


# Libraries whose fields are options, or that choose a default.
_LIBRARIES = ("trl", "transformers", "accelerate", "torch")


def description_of(command: str) -> dict[str, Any]:
    """Return the description of a sub-command; `dc_trl.command.describe` says what it holds.

    A process of its own generates it where none is kept, so that torch and TRL are never imported here.

    Raises:
        ImportError: TRL or another library is not installed, or the sub-command cannot be imported.
    """
    file, state = _file(command), _state()
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or something else has written there
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["state"] == state:
            return content["description"]
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "dc_trl.command.describe", command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ImportError(f"the options of dc-trl {command} cannot be read ({reason}): repair the installation.")
    description = json.loads(done.stdout.splitlines()[-1])
    with suppress(OSError):  # a read-only or full disk: the next process generates it again
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write at the same time.
        with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as unfinished:
            json.dump({"state": state, "description": description}, unfinished, ensure_ascii=False)
        os.replace(unfinished.name, file)
    return description


def _file(command: str) -> Path:
    home = os.path.expanduser("~/.cache")  # which stays as it is for a user without a home
    folder = os.environ.get("XDG_CACHE_HOME") or (home if os.path.isabs(home) else PACKAGE / "__pycache__")
    installation = hashlib.sha256(f"{sys.prefix}\n{PACKAGE}".encode()).hexdigest()[:16]
    return Path(folder, "dc_trl", f"{command}-{installation}.json")


@cache
def _state() -> str:
    """Digest of what a description depends on: the versions of the libraries, and the source files of this package."""
    files = [(str(file), file.stat()) for file in sorted(PACKAGE.rglob("*.py"))]
    sources = [(name, found.st_mtime_ns, found.st_size) for name, found in files]
    libraries = [version(name) for name in _LIBRARIES]
    return hashlib.sha256(repr((sys.version, libraries, sources)).encode()).hexdigest()
