"""FP8 products of vLLM's CPU engine on processors with AMX (vLLM 0.31, PyTorch 2.13). Runs within the engine.

PyTorch hands a product of FP8 matrices to oneDNN wherever the processor has AMX. Without AMX for float16 (Sapphire and
Emerald Rapids) oneDNN has no kernel for it but its reference, one number after the other: 64 × 128 by 128 × 256 takes
0.12 s there, and 0.2 ms in PyTorch's own code, with the same result.

oneDNN is turned off for these products alone: vLLM's own kernels for small bfloat16 layers end the process without it.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)  # once in a process: the kernel that is replaced has to be PyTorch's
def avoid_onednns_reference() -> torch.library.Library | None:
    """Has PyTorch multiply the FP8 matrices of this process itself, where oneDNN has no kernel for them.

    The operator's kernel is replaced, so compiled engines take it too; a graph cannot set oneDNN's flag. Returns what
    holds the new kernels, or None where there is nothing to avoid.
    """
    processor = torch.cpu.get_capabilities()
    if not processor.get("amx_int8") or processor.get("amx_fp16"):
        return None
    # oneDNN would have asked the kernel of the system for AMX, which vLLM's attention uses without asking.
    torch.cpu._init_amx()
    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        for name in ("_scaled_mm", "_scaled_mm.out"):
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            operators.impl(name, _without_onednn(kernel.call_boxed), "CPU", with_keyset=True)
    return operators


def _without_onednn(product: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.backends.mkldnn.set_flags(False)
        try:
            return product(*args, **kwargs)
        finally:
            torch.backends.mkldnn.set_flags(*before)

    return run
