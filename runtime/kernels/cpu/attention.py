"""Attention over the cache on the CPU by our own code: prompts, replies, and the checking of guesses.

Codes are read where they lie, nothing is made dense. The code is attention.h.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.cpu.elementwise import threads_for
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, CAttention
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.quantization.int4_vectors import int4_bytes

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, PACKED: 3}  # `CacheType` of attention_task.h
FOREVER = 2**62  # a window that nothing leaves
_INDICES = Declined("indices-not-int32")
_NOT_CPU = Declined("tensors-not-on-cpu")
_GRADIENT = Declined("no-gradient")
_TYPES = Declined("attention-types", {"multiple": LANES})
_LAYOUT = Declined("cache-layout")
_SCALES = Declined("cache-scales-layout")
_PACKING = Declined("int4-vector-types", {"multiple": LANES})


class _Pass(NamedTuple):
    """A `Ragged` as addresses of int32."""

    starts: int
    lengths: int
    table: int
    sequences: int
    table_width: int


def attend_paged(query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring) -> Tensor | Declined:
    """As `runtime.kernels.reference.attend_gathered`; the reason where this code cannot.

    query: bf16 or fp32, contiguous; keys and values lie alike, each vector contiguous. Sums are fp32 and in an order
    fixed by positions: the bits of a row depend on neither the rows beside it, how the prompt was cut, the size of
    blocks, nor the number of threads. ValueError where lengths or blocks cannot be.
    """
    starts, lengths, table = ragged.starts, ragged.lengths, ragged.block_table
    for one in (starts, lengths, table):
        if one.dtype != torch.int32 or not one.is_cpu or not one.is_contiguous():
            return _INDICES
    asked = _Pass(starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), len(lengths), table.shape[1])
    try:
        return _attend(query, keys, values, asked, scoring)
    except ValueError:
        raise ValueError(f"lengths {lengths.tolist()} do not fit blocks {table.tolist()}") from None


def attend_cached(
    query: Tensor,
    keys: Stored,
    values: Stored,
    mask: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | Declined:
    """As `runtime.kernels.reference.attend_dense`, of texts to themselves; the reason where this code cannot.

    query: [batch, tokens, heads, head_dim] bf16 or fp32; keys and values: whose last two axes are contiguous, the
    new tokens last, so that the window says what the mask would.
    """
    batch, tokens, _, head_dim = query.shape
    # Starts, lengths and a block for each; as tensors they would take as long as attention over a hundred positions.
    layout = (*range(0, (batch + 1) * tokens, tokens), *(keys.data.shape[2],) * batch, *range(batch))
    numbers = (ctypes.c_int32 * len(layout))(*layout)
    at = ctypes.addressof(numbers)
    asked = _Pass(at, at + 4 * (batch + 1), at + 4 * (2 * batch + 1), batch, 1)
    scoring = Scoring(head_dim**-0.5 if scale is None else scale, window, softcap or 0.0, sinks)
    return _attend(query, keys, values, asked, scoring)


def native_pack_int4(values: Tensor) -> Tensor | Declined:
    """As `runtime.cache.int4.pack_int4`: values bf16 or fp32 [tokens, ..., head_dim] to uint8 [tokens, ..., bytes]."""
    *outer, head_dim = values.shape
    if not values.is_cpu or values.dtype not in ROW_TYPES or head_dim % LANES:
        return _PACKING
    found = build.native()
    if isinstance(found, Declined):
        return found
    given, packed = values.contiguous(), torch.empty(*outer, int4_bytes(head_dim), dtype=PACKED)
    count, threads = given.numel() // head_dim, threads_for(outer[0] if outer else 1)
    if found.pack_int4(given.data_ptr(), ROW_TYPES[given.dtype], count, head_dim, packed.data_ptr(), threads):
        raise ResourceError("no memory for packing keys and values", code="less-context")
    return packed


def _attend(query: Tensor, keys: Stored, values: Stored, asked: _Pass, scoring: Scoring) -> Tensor | Declined:
    """query [..., heads, head_dim] to [..., heads * head_dim]. ValueError where lengths or blocks cannot be."""
    if not query.is_cpu or not keys.data.is_cpu:
        return _NOT_CPU
    if torch.is_grad_enabled() and query.requires_grad:
        return _GRADIENT
    *outer, heads, head_dim = query.shape
    data = keys.data
    if head_dim % LANES or query.dtype not in ROW_TYPES or data.dtype not in CACHE_TYPES:
        return _TYPES
    size = int4_bytes(head_dim) if data.dtype == PACKED else head_dim
    if data.shape[3] != size:
        return Declined("cache-vector-size", {"expected": size, "size": data.shape[3]})
    strides = data.stride()
    if strides != values.data.stride() or strides[2:] != (size, 1):
        return _LAYOUT
    for one in (keys, values):  # a scale lies where its vector's first code does, divided by head_dim
        if one.scales is not None and tuple(s * head_dim for s in one.scales.stride()) != strides[:3]:
            return _SCALES
    found = build.native()
    if isinstance(found, Declined):
        return found
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    query = query.contiguous()
    out = torch.empty(*outer, heads * head_dim, dtype=query.dtype)
    blocks, kv_heads, block_size, _ = data.shape
    task = CAttention(
        query=query.data_ptr(),
        keys=data.data_ptr(),
        values=values.data.data_ptr(),
        key_scales=None if keys.scales is None else keys.scales.data_ptr(),
        value_scales=None if values.scales is None else values.scales.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        starts=asked.starts,
        lengths=asked.lengths,
        table=asked.table,
        sequences=asked.sequences,
        table_width=asked.table_width,
        blocks=blocks,
        block_size=block_size,
        block_stride=strides[0],
        head_stride=strides[1],
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        window=FOREVER if scoring.window is None else scoring.window,
        scale=scoring.scale,
        softcap=scoring.softcap,
        query_type=ROW_TYPES[query.dtype],
        cache_type=CACHE_TYPES[data.dtype],
        out_type=ROW_TYPES[query.dtype],
    )
    failed = found.attend(ctypes.byref(task), torch.get_num_threads())
    if failed == 1:
        raise ResourceError("no memory for attention", code="less-context")
    if failed:
        raise ValueError("the lengths do not fit the blocks")
    return out
