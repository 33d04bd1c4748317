"""Scaled dot-product attention with grouped queries, a causal limit and an optional sliding window.

torch's fused attention does the work; this file says which keys a query may see. Does not know caches, rotation or
layers.
"""

import torch
from torch import Tensor
from torch.nn import functional


def visible(start: int, count: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of `start + count` keys each of the last `count` positions sees: bool [count, start + count].

    None where no mask is needed: a first chunk that no window cuts (plain causal), or a single token, which sees all
    that `attend` hands it.
    """
    end = start + count
    if count == 1 or (start == 0 and (window is None or window >= end)):
        return None
    query = torch.arange(start, end, device=device).unsqueeze(1)
    key = torch.arange(end, device=device)
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """query [batch, tokens, heads, head_dim]; keys, values [batch, kv_heads, length, head_dim], the new tokens last.

    Returns [batch, tokens, heads * head_dim]. `mask` comes from `visible` for the same tokens and `window`.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    if tokens == 1:
        if window is not None:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        # The queries of one kv head become the rows of one product: nothing is repeated, nothing is masked.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return functional.scaled_dot_product_attention(grouped, keys, values).reshape(batch, 1, -1)
    attended = functional.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    return attended.transpose(1, 2).reshape(batch, tokens, -1)
