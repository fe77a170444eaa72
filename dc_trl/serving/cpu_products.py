"""FP8 products of vLLM's CPU engine on processors with AMX (vLLM 0.31, PyTorch 2.13). Runs within the engine.

PyTorch hands a product of FP8 matrices to oneDNN wherever the processor has AMX. Without AMX for float16 (Sapphire and
Emerald Rapids) oneDNN has no kernel for it but its reference, one number after the other: 64 × 128 by 128 × 256 takes
0.12 s there, and 0.2 ms in PyTorch's own code, with the same result.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel


def avoid_onednns_reference() -> None:
    """Has PyTorch multiply the FP8 matrices of this process's engines itself, where oneDNN has its reference only."""
    processor = torch.cpu.get_capabilities()
    if processor.get("amx_int8") and not processor.get("amx_fp16"):
        # oneDNN would have asked the kernel of the system for AMX, which vLLM's attention uses without asking.
        torch.cpu._init_amx()
        kernel: Any = ChannelWiseTorchFP8ScaledMMLinearKernel
        kernel.apply_scaled_mm = without_onednn(kernel.apply_scaled_mm)


def without_onednn(product: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs with `torch.backends.mkldnn.enabled` off, and leaves it as it was.

    A compiled one (colocate mode) runs as it is: the flag is none of a graph's operations.
    """

    @wraps(product)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return product(*args, **kwargs)
        before = torch.backends.mkldnn.set_flags(False)
        try:
            return product(*args, **kwargs)
        finally:
            torch.backends.mkldnn.set_flags(*before)

    return run
