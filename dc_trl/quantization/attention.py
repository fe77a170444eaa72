"""Attention for decoding on a CPU: grouped queries without copies of the keys and values.

A decoding step has one query per sequence. PyTorch's fused attention takes four times as long for it in bfloat16 on a
CPU, and transformers' eager attention spends most of its time on repeating each key and value for every query head of
its group.

It rounds what vLLM's CPU engine rounds: the output and, where the processor multiplies bfloat16 in tiles (AMX), the
weights of the values. Eager attention rounds scores too. Everything else is computed in float64, where vLLM uses
float32: a float32 product is summed in another order for one query than for many, and decoding token by token would
differ from reading all tokens at once, as training does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .fake_quantize import straight_through


NAME = "dc_trl_grouped"
# Number of scores that are held at a time: those of a long prompt would not fit into memory, nor those of a batch into
# the cache.
_BLOCK = 2**19
# Number of keys and values that are held in float64 at a time.
_CONVERTED = 2**22
# Whether vLLM's attention uses AMX here, for heads of these widths (vllm/v1/attention/backends/cpu_attn.py).
_HAS_TILES = bool(torch.cpu.get_capabilities().get("amx_tile"))
_TILE_WIDTH = 32


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention block by block, rounded as in vLLM's CPU engine; see `AttentionInterface`.

    Args:
        module: attention layer; it is not used.
        query: shape (batch, heads, queries, width).
        key, value: shape (batch, groups, keys, width), where ``groups`` divides ``heads``.
        attention_mask: mask that is added to the scores, shape (batch, 1, queries, keys).
        scaling: factor of the scores.
        softcap: bound of the scores by a tanh (Gemma 2).
        s_aux: an additional score of each head, which takes part in the softmax and attends to nothing (gpt-oss).

    Returns:
        Shape (batch, queries, heads, width), and no attention weights.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    sequences_at_a_time = max(1, min(_BLOCK // (heads * queries), _CONVERTED // (2 * groups * width)) // keys)
    queries_at_a_time = max(1, _BLOCK // (heads * keys))
    in_tiles = _HAS_TILES and query.dtype == torch.bfloat16 and width % _TILE_WIDTH == 0
    output = query.new_empty(batch, queries, heads, width)
    for first in range(0, batch, sequences_at_a_time):
        b = slice(first, first + sequences_at_a_time)
        k, v = key[b].double().transpose(2, 3), value[b].double()
        for start in range(0, queries, queries_at_a_time):
            q = query[b, :, start : start + queries_at_a_time].double()
            scores = (q.reshape(len(q), groups, -1, width) @ k * scaling).view(*q.shape[:3], keys)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if attention_mask is not None:
                scores = scores + attention_mask[b, :, start : start + queries_at_a_time]
            if s_aux is not None:
                sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, sinks], dim=-1)
            if in_tiles:
                # Rounded for the product with the values, but not for the sum that the product is divided by.
                powers = (scores - scores.detach().amax(-1, keepdim=True)).exp()
                weights, total = straight_through(powers.bfloat16().double(), powers), powers.sum(-1, keepdim=True)
            else:
                weights, total = scores.softmax(-1), scores.new_ones(())
            weights = weights[..., :keys].reshape(len(q), groups, -1, keys)
            output[b, start : start + queries_at_a_time] = ((weights @ v).view(q.shape) / total).transpose(1, 2)
    return output, None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["eager"])
