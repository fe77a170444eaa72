"""Completes vLLM's CPU engine (vLLM 0.31, PyTorch 2.13): its reload of weights, and its FP8 products. Runs inside it.

The kernels of that engine keep copies of the weights, packed for the processor. Three kinds survive a reload:

- An output head that shares the embedding's weights: the reload finds no weights of its own, so the engine keeps the
  packed copy of the old head under the new layers.
- The scales of INT8 layers: the kernel keeps a pointer to tensors that the reload frees, and later requests read
  whatever is stored there, soon NaN.
- The experts of a mixture: they are packed only while there is no kernel for them, so it reads unpacked ones then.

`vllm serve --worker-extension-cls dc_trl.serving.cpu_reload.CPUReloadExtension` makes the complete reload callable.

PyTorch passes products of FP8 matrices to oneDNN on every processor with AMX. Without AMX for float16 (Sapphire and
Emerald Rapids) oneDNN takes 600 times as long as PyTorch's own code (0.12 s for 64 × 128 by 128 × 256). It is turned
off for these products only: vLLM's kernels for small bfloat16 layers end the process without it.

On AMX, vLLM multiplies the numbers of an FP8 cache by 2^-120, and tiles take sums below 2^-126 for zero. Its attention
for AVX-512, which does not, is used instead.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends import cpu_attn


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
            without_onednn = torch.backends.mkldnn.flags(enabled=False)(kernel.call_boxed)
            operators.impl(name, without_onednn, "CPU", with_keyset=True)
    return operators


def _without_tiles(choose: Callable[..., str], dtype: torch.dtype, block: int, width: int, cache: str) -> str:
    chosen = choose(dtype, block, width, cache)
    return "vec" if chosen == "amx" and is_quantized_kv_cache(cache) else chosen


# vLLM imports this file in each worker, before it builds the model.
_FP8_PRODUCTS = avoid_onednns_reference()
cpu_attn._get_attn_isa = partial(_without_tiles, cpu_attn._get_attn_isa)


class CPUReloadExtension:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    def reload_checkpoint(worker: Any, weights_path: str) -> None:  # noqa: N805 (it becomes a method of the worker)
        """Reload the weights of a CPU worker from a checkpoint directory, including the packed copies."""
        for module in worker.get_model().modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None
        scales = []
        create = _custom_ops.create_onednn_scaled_mm

        def create_and_keep(weight: Any, weight_scales: Any, *args: Any) -> Any:
            scales.append(weight_scales)
            return create(weight, weight_scales, *args)

        # The reload would also pack embeddings, which takes half of its time and is useless: no product uses them.
        with (
            patch.object(_custom_ops, "create_onednn_scaled_mm", create_and_keep),
            patch.object(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda method, layer: None),
        ):
            worker.reload_weights(weights_path=weights_path)
        # The scales must live as long as the kernels that point to them.
        worker.scales_in_use = scales
        # A model without a separate head multiplies by its embedding. In vLLM a head is a kind of embedding.
        embeddings = [module for module in worker.get_model().modules() if isinstance(module, VocabParallelEmbedding)]
        heads = [module for module in embeddings if isinstance(module, ParallelLMHead)]
        for module in heads or embeddings:
            module.quant_method.process_weights_after_loading(module)
