"""A worker extension with which vLLM's CPU engine takes its own emulation of NVFP4, which it has for GPUs alone."""

from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
from vllm.platforms import PlatformEnum

from dc_trl.serving.cpu_reload import CPUReloadExtension


register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


class EmulatedExtension(CPUReloadExtension):
    """The extension of dc_trl's servers; importing this module is what matters."""
