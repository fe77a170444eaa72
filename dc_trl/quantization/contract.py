"""The contract of a deployed checkpoint, `dc_trl.json`: its scheme, what sampled, and the SHA-256 of each tensor."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..files import read_object, write_text


CONTRACT_FILE = "dc_trl.json"


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors in the safetensors files of a directory, by name, an adapter's beside its base too."""
    return {key: value for file in sorted(directory.rglob("*.safetensors")) for key, value in load_file(file).items()}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, row by row, as they stand in a safetensors file."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def write_contract(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write the contract of the checkpoint in a directory: facts, as JSON values, and digests of its tensors."""
    digests = {name: digest(tensor) for name, tensor in read_tensors(directory).items()}
    text = json.dumps({**facts, "sha256": digests}, indent=2, ensure_ascii=False)
    write_text(directory / CONTRACT_FILE, f"{text}\n")


def read_contract(directory: Path) -> dict[str, Any]:
    """Return the contract of a checkpoint; a `ValueError` says that it has none, or none with scheme and digests."""
    path = directory / CONTRACT_FILE
    contract = read_object(path) if path.is_file() else {}
    if not (isinstance(contract.get("scheme"), str) and isinstance(contract.get("sha256"), dict)):
        raise ValueError(f"{path} is no contract with scheme and sha256: give the deployment/ of a run, or export it.")
    return contract


def broken_terms(contract: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each tensor that was changed, is missing or was added since the contract was written."""
    promised, found = contract["sha256"], {name: digest(tensor) for name, tensor in tensors.items()}
    return [
        f"{name} {'is missing' if name not in found else 'was changed' if name in promised else 'was added'}"
        for name in sorted(promised.keys() | found.keys())
        if promised.get(name) != found.get(name)
    ]
