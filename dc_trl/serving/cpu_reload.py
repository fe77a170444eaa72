"""What vLLM's CPU engine leaves out when it reloads weights in place (vLLM 0.31). Runs within the engine.

The kernels of that engine keep copies of the weights, packed for the processor. Three of them outlive a reload:

- An output head that shares the embedding's weights: the reload sees no weights of its own and leaves its packed copy,
  so that the engine goes on with the old head under the new layers.
- The scales of INT8 layers: the kernel holds a pointer to tensors that the reload frees; the next request reads
  whatever is there then, NaN before long.
- The experts of a mixture: they are packed only as long as there is no kernel for them, so that after a reload the
  kernel reads unpacked weights.

`vllm serve --worker-extension-cls dc_trl.serving.cpu_reload.CPUReloadExtension` makes the remedy callable.
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
    """Reloads the weights of a CPU worker from a checkpoint directory, packed copies included."""
    for module in worker.get_model().modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None
    scales = []
    create = _custom_ops.create_onednn_scaled_mm

    def create_and_keep(weight: Any, weight_scales: Any, *args: Any) -> Any:
        scales.append(weight_scales)
        return create(weight, weight_scales, *args)

    # The reload would pack embeddings too, with which nothing is multiplied and which take half of its time.
    with (
        patch.object(_custom_ops, "create_onednn_scaled_mm", create_and_keep),
        patch.object(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda method, layer: None),
    ):
        worker.reload_weights(weights_path=weights_path)
    # For as long as the kernels that point to them.
    worker.scales_in_use = scales
    # A model without a head of its own multiplies with its embedding. A head is a kind of embedding in vLLM.
    embeddings = [module for module in worker.get_model().modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [module for module in embeddings if isinstance(module, ParallelLMHead)]
    for module in heads or embeddings:
        module.quant_method.process_weights_after_loading(module)


class CPUReloadExtension:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    def reload_checkpoint(self, weights_path: str) -> None:
        reload_checkpoint(self, weights_path)
