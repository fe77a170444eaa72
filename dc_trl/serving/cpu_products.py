"""FP8 products of vLLM's CPU engine on processors with AMX (vLLM 0.31, PyTorch 2.13). Runs inside the engine.

PyTorch passes products of FP8 matrices to oneDNN on every processor with AMX. On processors without AMX for float16
(Sapphire and Emerald Rapids) oneDNN has only its reference kernel, which computes one number at a time: 64 × 128 by
128 × 256 takes 0.12 s, and 0.2 ms in PyTorch's own code, with the same result.

oneDNN is turned off for these products only: vLLM's own kernels for small bfloat16 layers end the process without it.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)  # once in a process: the kernel to replace must be PyTorch's
def avoid_onednns_reference() -> torch.library.Library | None:
    """Make PyTorch itself multiply the FP8 matrices of this process if oneDNN has no kernel for them.

    The operator's kernel is replaced, so that compiled engines use it too; a graph cannot set oneDNN's flag. Return
    the library that holds the new kernels, or None if oneDNN has a kernel.
    """
    processor = torch.cpu.get_capabilities()
    if not processor.get("amx_int8") or processor.get("amx_fp16"):
        return None
    # oneDNN would have requested AMX from the operating system, and vLLM's attention uses it without a request.
    torch.cpu._init_amx()
    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # a kernel is replaced on purpose
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
