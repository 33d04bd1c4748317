"""Scaled dot-product attention with grouped queries, a causal limit and an optional sliding window.

This file says which keys a query may see; the kernels are listed in `runtime.kernels.registry`. Does not know rotation
or layers.
"""

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.kernels.registry import ATTENTION


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


def attend(
    query: Tensor,
    keys: Stored,
    values: Stored,
    mask: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query [batch, tokens, heads, head_dim]; keys, values of [batch, kv_heads, length, head_dim], the new tokens last.

    Returns [batch, tokens, heads * head_dim]. `mask` comes from `visible` for the same tokens and `window`.
    `scale` and `softcap` are those of `AttentionSpec`.
    """
    return ATTENTION(query, keys, values, mask, window, scale, softcap)
