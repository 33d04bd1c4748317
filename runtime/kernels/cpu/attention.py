"""Attention over the cache on the CPU by our own code: prompts, replies, and the checking of guesses.

Codes are read where they lie, nothing is made dense. The code is attention.h.
"""

import ctypes

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import ResourceError
from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu.build import CAttention
from mycli.runtime.kernels.paged import Ragged, Scoring

_QUERY = {torch.float32: 0, torch.bfloat16: 1}  # `Type` of packed_layout.h
_CACHE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # `CacheType` of attention_task.h
_LANES = 16
_FOREVER = 2**62  # a window that nothing leaves


def attend_paged(query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring) -> Tensor | str:
    """As `runtime.kernels.reference.attend_gathered`; the reason where this code cannot.

    query: bf16 or fp32, contiguous; keys and values lie alike, each vector contiguous. Sums are fp32 and in an order
    fixed by positions: the bits of a row depend on neither the rows beside it, how the prompt was cut, the size of
    blocks, nor the number of threads. ValueError where lengths or blocks cannot be.
    """
    if any(one.device.type != "cpu" for one in (query, keys.data, ragged.starts)):
        return "takes tensors on the CPU"
    if torch.is_grad_enabled() and query.requires_grad:
        return "has no gradient"
    _, heads, head_dim = query.shape
    data = keys.data
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
    layout = (ragged.starts, ragged.lengths, ragged.block_table)
    if any(one.dtype != torch.int32 or not one.is_contiguous() for one in layout):
        return "takes starts, lengths and block tables as contiguous int32"
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    query = query.contiguous()
    out = torch.empty(len(query), heads * head_dim, dtype=query.dtype)
    task = CAttention(
        query=query.data_ptr(),
        keys=data.data_ptr(),
        values=values.data.data_ptr(),
        key_scales=None if keys.scales is None else keys.scales.data_ptr(),
        value_scales=None if values.scales is None else values.scales.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        starts=ragged.starts.data_ptr(),
        lengths=ragged.lengths.data_ptr(),
        table=ragged.block_table.data_ptr(),
        sequences=len(ragged.lengths),
        table_width=ragged.block_table.shape[1],
        blocks=data.shape[0],
        block_size=data.shape[2],
        block_stride=data.stride(0),
        head_stride=data.stride(1),
        kv_heads=data.shape[1],
        group=heads // data.shape[1],
        head_dim=head_dim,
        window=_FOREVER if scoring.window is None else scoring.window,
        scale=scoring.scale,
        softcap=scoring.softcap,
        query_type=_QUERY[query.dtype],
        cache_type=_CACHE[data.dtype],
    )
    failed = found.attend(ctypes.byref(task), torch.get_num_threads())
    if failed == 1:
        raise ResourceError("no memory for attention", code="less-context")
    if failed:
        raise ValueError(f"lengths {ragged.lengths.tolist()} do not fit blocks {ragged.block_table.tolist()}")
    return out


def attend_cached(
    query: Tensor,
    keys: Stored,
    values: Stored,
    mask: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor | str:
    """As `runtime.layers.attention.attend`, over a cache in one piece; the reason where this code cannot.

    query: [batch, tokens, heads, head_dim] bf16 or fp32; keys and values: views of one cache, the new tokens last, so
    that the window says what the mask would.
    """
    batch, tokens, heads, head_dim = query.shape
    ragged = Ragged.in_step(batch, tokens, keys.data.shape[2], query.device)
    scoring = Scoring(head_dim**-0.5 if scale is None else scale, window, softcap or 0.0)
    attended = attend_paged(query.reshape(batch * tokens, heads, head_dim), keys, values, ragged, scoring)
    return attended if isinstance(attended, str) else attended.view(batch, tokens, heads * head_dim)
