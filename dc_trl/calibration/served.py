"""Whether the hashes that a vLLM server makes of its own weights are those of a deployed checkpoint."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..quantization.contract import digest


_REWRITTEN = ("weight_shape", "global_scale")  # vectors of which vLLM keeps another form
_OTHER_RANK = re.compile(r"\btp[1-9]")  # of tensor parallelism
# Layers of vLLM that hold several layers of a checkpoint, one below the other.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def compare_hashes(hashes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Compare the hashes of vLLM's `/weight_checker` (0.32) with the tensors of a checkpoint, both by name.

    vLLM fuses layers, transposes matrices for some kernels and pads the vocabulary. Other kernels have layouts of
    their own, and with tensor parallelism each process holds a part.

    Returns:
        Names of parameters that hold other bytes, and names that cannot be compared. A parameter can be if it is a
        vector, or if that of another layer is found in one of the layouts.
    """
    unlike, known, compared = dict[str, bool](), set[str](), set[str]()
    in_parts = any(_OTHER_RANK.search(key) for key in hashes)
    for key, hashed in hashes.items():
        name = key.rpartition(":")[2]  # after the process's ranks
        fused = next((each for each in _FUSED if f".{each}." in name), None)
        parts = [name] if fused is None else [name.replace(fused, part) for part in _FUSED[fused]]
        unlike[key] = False  # whether it certainly holds other bytes
        if tensors.keys() >= set(parts):
            compared.update(parts)
            whole = torch.cat([tensors[part] for part in parts])
            layouts = [whole]
            if whole.ndim == 2:
                layouts += [whole.t(), torch.cat([whole, whole.new_zeros(-len(whole) % 64, whole.shape[1])])]
            unlike[key] = whole.ndim == 1 and not in_parts and not name.endswith(_REWRITTEN)
            if hashed in map(digest, layouts):
                del unlike[key]
                known.add(_without_numbers(key))
    other = [key for key, certain in unlike.items() if certain or _without_numbers(key) in known]
    others, unknown = ({key.rpartition(":")[2]: None for key in keys} for keys in (other, unlike.keys() - set(other)))
    return list(others), sorted(unknown.keys() | tensors.keys() - compared)


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "", key)
