"""Says which kernel vLLM would choose for experts on a GPU, and writes the table of docs/supported.md without one.

    python scripts/backends.py        two minutes for each kind of GPU

vLLM's own choice is asked, with Qwen3-30B-A3B on four GPUs, in a process whose platform is faked: a CUDA platform of a
compute capability, with FlashInfer, DeepGEMM and CUTLASS installed. Whether a kernel runs is not seen.
"""

import argparse
import json
import subprocess
import sys
import types
from functools import cache

from install import ROOT


GPUS = {"9.0": "Hopper", "10.0": "Blackwell"}  # CUTLASS has grouped products on both, and not on Ada
PAGE = ROOT / "docs" / "supported.md"
BEGIN, END = "<!-- made by scripts/backends.py -->", "<!-- end of backends -->"
# What vLLM asks of the machine, beside its capability.
INSTALLED = ("has_flashinfer", "has_deep_gemm", "cutlass_group_gemm_supported", "cutlass_fp8_supported")


def fake_platform(capability: str) -> None:
    """Put a CUDA platform in the place of this machine's, in every module of vLLM that has been imported."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C"):  # kernels that the CPU build lacks
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(name))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    faked = DeviceCapability(*map(int, capability.split(".")))

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return faked

        @classmethod
        def has_device_capability(cls, capability, device_id=0):
            return faked >= (capability if isinstance(capability, tuple) else divmod(capability, 10))

        @classmethod
        def get_device_name(cls, device_id=0):
            return "faked"

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

    for module in [module for name, module in sys.modules.items() if name.startswith("vllm")]:
        for name, value in list(vars(module).items()):
            if name == "current_platform":
                module.current_platform = Platform()
            elif name.startswith(INSTALLED) or ("cutlass" in name and "supports" in name):
                setattr(module, name, lambda *args, **kwargs: True)
            elif isinstance(value, type(cache(len))):  # may have been asked before the platform was faked
                value.cache_clear()


def chosen(capability: str) -> dict[str, str]:
    """The kernel of experts by scheme; "–" where vLLM finds none."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import config as moe
    from vllm.model_executor.layers.fused_moe import experts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, mxfp8, nvfp4, unquantized
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    config = VllmConfig()
    for name in ("triton_moe", "triton_cutlass_moe", "cutlass_moe", "triton_deep_gemm_moe", "flashinfer_cutlass_moe"):
        __import__(f"{experts.__name__}.{name}")
    for name in ("trtllm_fp8_moe", "trtllm_bf16_moe", "trtllm_nvfp4_moe", "marlin_moe", "flashinfer_cutedsl_moe"):
        __import__(f"{experts.__name__}.{name}")
    fake_platform(capability)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    sizes = {"tp_size": 4, "pcp_size": 1, "dp_size": 1, "ep_size": 1, "sp_size": 1}
    parallel = moe.FusedMoEParallelConfig(
        **sizes, **ranks, use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False
    )
    counts = dict.fromkeys(("num_experts", "num_local_experts", "num_logical_experts"), 128)
    layer = {"experts_per_token": 8, "hidden_dim": 2048, "intermediate_size": 768, "in_dtype": torch.bfloat16}
    layer |= {"activation": MoEActivation.SILU, "device": "cpu", "moe_parallel_config": parallel}
    with set_current_vllm_config(config):
        mixture = moe.FusedMoEConfig(**counts, **layer, routing_method=moe.RoutingMethodType.Renormalize)

        channel, token = keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym
        block, group = keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
        mixtures = {
            "bf16": lambda: unquantized.select_unquantized_moe_backend(mixture),
            "fp8": lambda: fp8.select_fp8_moe_backend(mixture, channel, token, allow_vllm_cutlass=True),
            "fp8_block": lambda: fp8.select_fp8_moe_backend(mixture, block, group, allow_vllm_cutlass=True),
            "int8": lambda: int8.select_int8_moe_backend(
                mixture, keys.kInt8StaticChannelSym, keys.kInt8DynamicTokenSym
            ),
            "nvfp4": lambda: nvfp4.select_nvfp4_moe_backend(mixture, keys.kNvfp4Static, keys.kNvfp4Dynamic),
            "mxfp8": lambda: mxfp8.select_mxfp8_moe_backend(mixture),
        }
        return {name: asked(choose) for name, choose in mixtures.items()}


def asked(choose) -> str:
    try:
        found = choose()
    except (ValueError, NotImplementedError) as refusal:
        print(refusal, file=sys.stderr)
        return "–"
    return found[0].value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", help="print the choice for one, as JSON")
    args = parser.parse_args()
    if args.capability:
        print(json.dumps(chosen(args.capability)))
        return
    found = {}
    for capability in GPUS:
        run = subprocess.run(
            [sys.executable, __file__, "--capability", capability], check=True, stdout=subprocess.PIPE, text=True
        )
        found[capability] = json.loads(run.stdout.splitlines()[-1])
    rows = [["scheme", *(f"{name} ({capability})" for capability, name in GPUS.items())], ["---"] * (len(GPUS) + 1)]
    rows += [[f"`{name}`", *(found[each][name] for each in GPUS)] for name in found["9.0"]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
