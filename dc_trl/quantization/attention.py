"""Attention for decoding on a CPU, grouped queries without copies of the keys and values, and the FP8 KV cache.

A decoding step has one query per sequence. PyTorch's fused attention takes four times as long for it in bfloat16 on a
CPU, and transformers' eager attention spends most of its time on repeating keys and values for the heads of a group.

It rounds what vLLM's CPU engine rounds: the output and, where the processor multiplies bfloat16 in tiles (AMX), the
weights of the values. Eager attention rounds scores too. Everything else is computed in float64, where vLLM uses
float32: a float32 product is summed in another order for one query than for many, and decoding token by token would
differ from reading all tokens at once, as training does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .fake_quantize import straight_through


NAME = "dc_trl_grouped"
# Number of scores that are held at a time: a long prompt's would not fit into memory, nor a batch's into the cache.
_BLOCK = 2**19
# Number of keys and values that are held in float64 at a time.
_CONVERTED = 2**22
# Whether vLLM's attention uses AMX here, for heads of these widths (vllm/v1/attention/backends/cpu_attn.py).
_HAS_TILES = bool(torch.cpu.get_capabilities().get("amx_tile"))
_TILE_WIDTH = 32
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    from_fp8_cache: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention block by block, rounded as in vLLM's CPU engine; see `AttentionInterface`.

    Args:
        module: attention layer; it is not used.
        query: shape (batch, heads, queries, width).
        key, value: shape (batch, groups, keys, width), where ``groups`` divides ``heads``; values may be narrower.
        attention_mask: mask that is added to the scores, shape (batch, 1, queries, keys).
        scaling: factor of the scores.
        softcap: bound of the scores by a tanh (Gemma 2).
        s_aux: an additional score of each head, which takes part in the softmax and attends to nothing (gpt-oss).
        from_fp8_cache: whether keys and values come from a KV cache in FP8, which dc_trl's servers read without tiles.

    Returns:
        Shape (batch, queries, heads, width), and no attention weights.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    sequences_at_a_time = max(1, min(_BLOCK // (heads * queries), _CONVERTED // (2 * groups * width)) // keys)
    queries_at_a_time = max(1, _BLOCK // (heads * keys))
    in_tiles = _HAS_TILES and not from_fp8_cache and query.dtype == torch.bfloat16 and width % _TILE_WIDTH == 0
    output = query.new_empty(batch, queries, heads, value.shape[-1])
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
            attended = (weights @ v).view(*q.shape[:3], -1) / total
            output[b, start : start + queries_at_a_time] = attended.transpose(1, 2)
    return output, None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["eager"])


def with_fp8_cache(name: str) -> str:
    """Register attention that reads its keys and values from a KV cache in FP8; return the name of it.

    Args:
        name: the attention that it calls, by the name that transformers knows it by.

    Raises:
        ValueError: transformers has no function of this name, as for "eager", or it is one of FlashAttention.
    """
    if name not in ALL_ATTENTION_FUNCTIONS or "flash" in name:  # FlashAttention's kernels are found by their names
        raise ValueError(
            f"attn_implementation={name!r} does not let its keys and values be rounded to a KV cache in FP8: load the "
            "model with attn_implementation='sdpa', or set a deployment_scheme without '+fp8_kv'."
        )
    attend, cached = ALL_ATTENTION_FUNCTIONS[name], f"{name}_fp8_kv"

    def attend_cached(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(module, query, in_fp8_cache(key), in_fp8_cache(value), *args, from_fp8_cache=True, **kwargs)

    AttentionInterface.register(cached, attend_cached)
    AttentionMaskInterface.register(cached, AttentionMaskInterface()[name])
    return cached


def in_fp8_cache(values: Tensor) -> Tensor:
    """Return keys or values, of any shape, as a KV cache in FP8 (E4M3) with a scale of 1 gives them back.

    On a CPU, vLLM cuts off the bits that E4M3 does not have, and on a GPU it rounds to the nearest number. Numbers
    beyond 448 become 448. The gradient passes unchanged.
    """
    if values.device.type == "cpu":
        _, exponent = torch.frexp(values.detach().float())
        # A number keeps four bits, and the smallest step is 2⁻⁹.
        step = torch.ldexp(torch.ones_like(values, dtype=torch.float32), exponent.clamp(min=-5) - 4)
        rounded = (values.detach() / step).trunc() * step
    else:
        rounded = values.detach().clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float()
    return straight_through(rounded.clamp(-_LARGEST, _LARGEST).to(values.dtype), values)
