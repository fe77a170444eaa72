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
from .schemes import named_scheme, quantizes_cache


CONTRACT_FILE = "dc_trl.json"


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors in the safetensors files of a directory, by name, an adapter's beside its base too.

    Raises:
        ValueError: two files hold a tensor, of which an engine may load either.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.rglob("*.safetensors")):
        found = load_file(file)
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{file} holds {min(twice)}, which another file there holds too: remove one of them.")
        tensors |= found
    return tensors


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, row by row, as they stand in a safetensors file."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def write_contract(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write the contract of the checkpoint in a directory: facts, as JSON values, and digests of its tensors."""
    digests = {name: digest(tensor) for name, tensor in read_tensors(directory).items()}
    text = json.dumps({**facts, "sha256": digests}, indent=2, ensure_ascii=False)
    write_text(directory / CONTRACT_FILE, f"{text}\n")


def read_contract(directory: Path) -> dict[str, Any]:
    """Return the contract of a checkpoint; a `ValueError` says that it has none, or one that cannot be its own."""
    path = directory / CONTRACT_FILE
    contract = read_object(path) if path.is_file() else {}
    if not (isinstance(contract.get("scheme"), str) and isinstance(contract.get("sha256"), dict)):
        raise ValueError(f"{path} is no contract with scheme and sha256: give the deployment/ of a run, or export it.")
    found = read_object(directory / "config.json").get("quantization_config") or {}
    stored = (found.get("config_groups") or {}).get("group_0") or {}
    named = named_scheme(contract["scheme"]).model_dump(mode="json")
    if _kind(named, quantizes_cache(contract["scheme"])) != _kind(stored, bool(found.get("kv_cache_scheme"))):
        raise ValueError(f"{path} says scheme={contract['scheme']!r}, and config.json another one: export it again.")
    return contract


def _kind(scheme: Mapping[str, Any], cache: bool) -> list[Any]:
    """Return what tells the schemes apart, whatever the size of their groups."""
    kinds = [scheme.get("weights") or {}, scheme.get("input_activations") or {}]
    return [cache, *([kind.get(name) for name in ("num_bits", "type", "strategy")] for kind in kinds)]


def broken_terms(contract: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each tensor that was changed, is missing or was added since the contract was written."""
    promised, found = contract["sha256"], {name: digest(tensor) for name, tensor in tensors.items()}
    return [
        f"{name} {'is missing' if name not in found else 'was changed' if name in promised else 'was added'}"
        for name in sorted(promised.keys() | found.keys())
        if promised.get(name) != found.get(name)
    ]
