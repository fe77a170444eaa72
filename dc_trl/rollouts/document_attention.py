"""PyTorch's fused attention for several sequences in one row, without computing pairs of different sequences.

transformers supports such rows with FlashAttention and flex attention. Its `sdpa` computes all pairs of the row and
masks those of different sequences, which multiplies the number of scores by the number of sequences.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface


NAME = "dc_trl_documents"
_sdpa, _sdpa_mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    document_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Apply `sdpa` to each sequence of a row; see `AttentionInterface`.

    Args:
        module: attention layer.
        query: shape (1, heads, tokens, width); any batch where `document_lengths` is not given.
        key, value: shape (1, groups, tokens, width).
        attention_mask: mask of layers with a sliding window, boolean, shape (1, 1, tokens, tokens); None where each
            token attends to all tokens before it in its sequence.
        document_lengths: number of tokens of each sequence, in the order of the row. Without them, `sdpa` is called on
            the whole row.

    Returns:
        Shape (1, tokens, heads, width), and no attention weights.
    """
    if document_lengths is None:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    outputs, start = [], 0
    for length in document_lengths:
        part = slice(start, start + length)
        mask = None if attention_mask is None else attention_mask[..., part, part]
        tensors = (each[:, :, part] for each in (query, key, value))
        outputs.append(_sdpa(module, *tensors, mask, **kwargs)[0])
        start += length
    return torch.cat(outputs, dim=1), None


def _document_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return `sdpa`'s mask; None for a row of sequences without a window, whose mask would have all pairs."""
    packed = attention_mask is None and not allow_is_causal_skip and not use_vmap and q_length == kv_length > 1
    if packed and local_size is None:
        return None
    options = {"allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap, "local_size": local_size}
    return _sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options, **kwargs)


AttentionInterface.register(NAME, document_attention)
AttentionMaskInterface.register(NAME, _document_mask)
