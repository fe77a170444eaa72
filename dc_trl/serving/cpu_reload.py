"""Completes the in-place reload of weights by vLLM's CPU engine (vLLM 0.31). Runs inside the engine.

The kernels of that engine keep copies of the weights, packed for the processor. Three kinds survive a reload:

- An output head that shares the embedding's weights: the reload finds no weights of its own, so the engine keeps the
  packed copy of the old head under the new layers.
- The scales of INT8 layers: the kernel keeps a pointer to tensors that the reload frees, and later requests read
  whatever is stored there, soon NaN.
- The experts of a mixture: they are packed only while there is no kernel for them, so after a reload the kernel reads
  unpacked weights.

`vllm serve --worker-extension-cls dc_trl.serving.cpu_reload.CPUReloadExtension` makes the complete reload callable.
"""

from typing import Any
from unittest.mock import patch

from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from .cpu_products import avoid_onednns_reference


# vLLM imports this file in each worker, before it builds the model.
avoid_onednns_reference()


def reload_checkpoint(worker: Any, weights_path: str) -> None:
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


class CPUReloadExtension:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    def reload_checkpoint(self, weights_path: str) -> None:
        reload_checkpoint(self, weights_path)
