"""Attention of a few tokens over the cache on the CPU by our own code: a reply's step, and the checking of guesses.

Codes are read where they lie, nothing is made dense. The code is attention.h.
"""

import ctypes

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import ResourceError
from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu.build import CAttention

_QUERY = {torch.float32: 0, torch.bfloat16: 1}  # `Type` of packed_layout.h
_CACHE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # `CacheType` of attention.h
_LANES = 16
TOKENS = 8  # at most; more are a prompt, for which torch's products are better


def attend_few(
    query: Tensor,
    keys: Stored,
    values: Stored,
    mask: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor | str:
    """As `runtime.layers.attention.attend`, for up to `TOKENS` tokens; the reason where this code cannot.

    query: [batch, tokens, heads, head_dim] bf16 or fp32, contiguous; keys and values: views of one cache, the new
    tokens last, so that the window says what the mask would. Sums are fp32; a row's bits depend on neither the rows
    beside it nor the number of threads.
    """
    batch, tokens, heads, head_dim = query.shape
    data = keys.data
    if data.device.type != "cpu" or tokens > TOKENS:
        return f"takes up to {TOKENS} tokens on the CPU"
    if softcap is not None or (scale is not None and scale != head_dim**-0.5):
        return "takes scores over the root of head_dim, uncapped"
    if head_dim % _LANES or query.dtype not in _QUERY or data.dtype not in _CACHE:
        return f"takes bf16 and fp32, caches of those or int8, and heads in multiples of {_LANES}"
    if data.stride() != values.data.stride() or data.stride()[2:] != (head_dim, 1):
        return "takes a cache whose keys and values lie alike, the last two axes contiguous"
    for one in (keys, values):  # a scale lies where its vector's first code does, divided by head_dim
        if one.scales is not None and tuple(s * head_dim for s in one.scales.stride()) != data.stride()[:3]:
            return "takes scales that lie as their vectors do"
    found = build.native()
    if isinstance(found, str):
        return found
    kv_heads, length = data.shape[1], data.shape[2]
    query = query.contiguous()
    out = torch.empty(batch, tokens, heads * head_dim, dtype=query.dtype)
    task = CAttention(
        query=query.data_ptr(),
        keys=data.data_ptr(),
        values=values.data.data_ptr(),
        key_scales=None if keys.scales is None else keys.scales.data_ptr(),
        value_scales=None if values.scales is None else values.scales.data_ptr(),
        out=out.data_ptr(),
        sequences=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        length=length,
        window=length if window is None else window,
        sequence_stride=data.stride(0),
        head_stride=data.stride(1),
        query_type=_QUERY[query.dtype],
        cache_type=_CACHE[data.dtype],
    )
    if found.attend(ctypes.byref(task), torch.get_num_threads()):
        raise ResourceError(f"no memory for attention over {length} tokens", code="less-context")
    return out
