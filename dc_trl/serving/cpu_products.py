"""FP8 products of vLLM's CPU engine on processors with AMX (vLLM 0.31, PyTorch 2.13). Runs within the engine.

PyTorch hands a product of FP8 matrices to oneDNN wherever the processor has AMX. Without AMX for float16 (Sapphire and
Emerald Rapids) oneDNN has no kernel for it but its reference, one number after the other: 64 × 128 by 128 × 256 takes
0.12 s there, and 0.2 ms in PyTorch's own code, with the same result.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel


def avoid_onednns_reference() -> None:
    """Has PyTorch multiply the FP8 matrices of this process's eager engines itself, where oneDNN has no kernel."""
    if _has_reference_only():
        # oneDNN would have asked the kernel of the system for AMX, which vLLM's attention uses without asking.
        torch.cpu._init_amx()
        kernel: Any = ChannelWiseTorchFP8ScaledMMLinearKernel
        kernel.apply_scaled_mm = _by_pytorch(kernel.apply_scaled_mm)


def pytorchs_products() -> AbstractContextManager[None]:
    """A block in which the products of compiled engines in this process (colocate mode) avoid it too.

    What a compiled product calls looks at PyTorch's flag each time; a graph cannot set it.
    """
    return _without_onednn() if _has_reference_only() else nullcontext()


def _has_reference_only() -> bool:
    processor = torch.cpu.get_capabilities()
    return bool(processor.get("amx_int8") and not processor.get("amx_fp16"))


def _by_pytorch(product: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(product)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return product(*args, **kwargs)
        with _without_onednn():
            return product(*args, **kwargs)

    return run


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(*before)
