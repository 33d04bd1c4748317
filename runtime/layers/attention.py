"""Scaled dot-product attention with grouped queries, a causal limit and an optional sliding window.

A few tokens on the CPU are our own code's, everything else torch's fused attention; this file says which keys a query
may see. Does not know rotation or layers.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.kernels.cpu.attention import attend_few


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


def attend(query: Tensor, keys: Stored, values: Stored, mask: Tensor | None, window: int | None) -> Tensor:
    """query [batch, tokens, heads, head_dim]; keys, values of [batch, kv_heads, length, head_dim], the new tokens last.

    Returns [batch, tokens, heads * head_dim]. `mask` comes from `visible` for the same tokens and `window`.
    """
    found = attend_few(query, keys, values, window)
    return attend_dense(query, keys, values, mask, window) if found is None else found


def attend_dense(query: Tensor, keys: Stored, values: Stored, mask: Tensor | None, window: int | None) -> Tensor:
    """As `attend`, by torch; codes become values of the query's dtype first, those of this layer only."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads = keys.data.shape[1]
    if tokens == 1 and window is not None:
        keys, values = keys.last(window), values.last(window)
    key, value = keys.dense(query.dtype), values.dense(query.dtype)
    if tokens == 1:
        # The queries of one kv head become the rows of one product: nothing is repeated, nothing is masked.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return functional.scaled_dot_product_attention(grouped, key, value).reshape(batch, 1, -1)
    attended = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    return attended.transpose(1, 2).reshape(batch, tokens, -1)
