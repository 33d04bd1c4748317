"""Attention over the KV cache on the CPU in C++ (attention.h): prefill, decoding, and the verification of drafts.

Quantized keys and values are multiplied as they are stored; no dense copy is made.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.cpu.elementwise import threads_for
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, CAttention, pointer
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.quantization.int4_vectors import int4_groups

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, PACKED: 3}  # `CacheType` of attention_task.h
FOREVER = 2**62  # the window of attention without one
_INDICES = Declined("indices-not-int32")
_NOT_CPU = Declined("tensors-not-on-cpu")
_GRADIENT = Declined("no-gradient")
_TYPES = Declined("attention-types")
_LAYOUT = Declined("cache-layout")
_SCALES = Declined("cache-scales-layout")
_PACKING = Declined("int4-vector-types", {"multiple": LANES})


def native_window(window: int | None, chunk: int | None) -> int:
    """Return `window` of attention_task.h; not both may be given."""
    assert window is None or chunk is None
    if chunk is not None:
        return -chunk
    return FOREVER if window is None else window


class _Indices(NamedTuple):
    # Addresses of the int32 arrays of a `Ragged`, and their sizes.
    starts: int
    lengths: int
    table: int
    sequences: int
    table_width: int


def attend_paged(query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring) -> Tensor | Declined:
    """`attend_gathered` for bf16 or fp32 queries, keys and values of one layout with contiguous vectors."""
    # Sums are fp32, in an order fixed by positions: a row's bits depend on neither the other rows, how the prompt was
    # split, the block size, nor the number of threads. Raises ValueError if a length does not fit its blocks.
    starts, lengths, table = ragged.starts, ragged.lengths, ragged.block_table
    for tensor in (starts, lengths, table):
        if tensor.dtype != torch.int32 or not tensor.is_cpu or not tensor.is_contiguous():
            return _INDICES
    if (declined := _declined(query, keys)) is not None:
        return declined
    indices = _Indices(starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), len(lengths), table.shape[1])
    try:
        return _attend(query, keys, values, indices, scoring, ragged.portable)
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
    chunk: int | None = None,
) -> Tensor | Declined:
    """`attend_dense` of sequences to their own positions: query [batch, tokens, heads, head_dim]."""
    # The new tokens are the last of keys and values, so that `window` says what `mask` would.
    if (declined := _declined(query, keys)) is not None:
        return declined
    if keys.data.shape != values.data.shape:
        return _LAYOUT
    if keys.data.stride(2) != keys.data.shape[3]:  # token by token, as projections return them
        keys, values = keys.contiguous(), values.contiguous()
    batch, tokens, _, head_dim = query.shape
    # Starts, lengths and one block per sequence; making tensors would take as long as attention over a hundred
    # positions.
    layout = (*range(0, (batch + 1) * tokens, tokens), *(keys.data.shape[2],) * batch, *range(batch))
    numbers = (ctypes.c_int32 * len(layout))(*layout)
    address = ctypes.addressof(numbers)
    indices = _Indices(address, address + 4 * (batch + 1), address + 4 * (2 * batch + 1), batch, 1)
    exact_scale = head_dim**-0.5 if scale is None else scale
    scoring = Scoring(exact_scale, window, softcap or 0.0, chunk=chunk, sinks=sinks)
    return _attend(query, keys, values, indices, scoring)


def native_stored(values: Tensor, dtype: torch.dtype) -> Stored | Declined:
    """`Stored.of` for an int4 cache: values bf16 or fp32 [tokens, ..., head_dim]."""
    *outer, head_dim = values.shape
    if dtype != PACKED or not values.is_cpu or values.dtype not in ROW_TYPES or head_dim % LANES:
        return _PACKING
    library = build.native()
    if isinstance(library, Declined):
        return library
    vectors, codes = values.contiguous(), torch.empty(*outer, head_dim // 2, dtype=PACKED)
    scales = torch.empty(*outer, int4_groups(head_dim), dtype=torch.bfloat16)
    count, threads = vectors.numel() // head_dim, threads_for(outer[0] if outer else 1)
    pointers = codes.data_ptr(), scales.data_ptr()
    if library.pack_int4(vectors.data_ptr(), ROW_TYPES[vectors.dtype], count, head_dim, *pointers, threads):
        raise ResourceError("no memory for packing keys and values", code="less-context")
    return Stored(codes, scales)


def _declined(query: Tensor, keys: Stored) -> Declined | None:
    if not query.is_cpu or not keys.data.is_cpu:
        return _NOT_CPU
    return _GRADIENT if torch.is_grad_enabled() and query.requires_grad else None


def _decline_layout(query: Tensor, keys: Stored, values: Stored) -> Declined | None:
    data, head_dim = keys.data, query.shape[-1]
    if query.dtype not in ROW_TYPES or data.dtype not in CACHE_TYPES:
        return _TYPES
    if data.dtype == PACKED and head_dim % LANES:
        return _PACKING
    size = head_dim // 2 if data.dtype == PACKED else head_dim
    if data.shape[3] != size:
        return Declined("cache-vector-size", {"expected": size, "size": data.shape[3]})
    strides = data.stride()
    if strides != values.data.stride() or strides[2:] != (size, 1):
        return _LAYOUT
    if any(step % size for step, count in zip(strides, data.shape[:2], strict=False) if count > 1):
        return _LAYOUT
    if data.dtype not in (torch.int8, PACKED):
        return None
    expected = tuple(step // size for step in strides[:3])
    if data.dtype == PACKED:
        groups = int4_groups(head_dim)
        expected = *(step * groups for step in expected), 1
    scales = keys.scales, values.scales
    return _SCALES if any(part is None or part.stride() != expected for part in scales) else None


def _attend(
    query: Tensor, keys: Stored, values: Stored, indices: _Indices, scoring: Scoring, portable: bool = False
) -> Tensor | Declined:
    if (declined := _decline_layout(query, keys, values)) is not None:
        return declined
    library = build.native()
    if isinstance(library, Declined):
        return library
    *outer, heads, head_dim = query.shape
    data = keys.data
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    query = query.contiguous()
    out = torch.empty(*outer, heads * head_dim, dtype=query.dtype)
    blocks, kv_heads, block_size, size = data.shape
    task = CAttention(
        query=query.data_ptr(),
        keys=data.data_ptr(),
        values=values.data.data_ptr(),
        key_scales=pointer(keys.scales),
        value_scales=pointer(values.scales),
        sinks=pointer(sinks),
        out=out.data_ptr(),
        starts=indices.starts,
        lengths=indices.lengths,
        table=indices.table,
        sequences=indices.sequences,
        table_width=indices.table_width,
        blocks=blocks,
        block_size=block_size,
        block_stride=data.stride(0) // size,
        head_stride=data.stride(1) // size,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        window=native_window(scoring.window, scoring.chunk),
        scale=scoring.scale,
        softcap=scoring.softcap,
        query_type=ROW_TYPES[query.dtype],
        cache_type=CACHE_TYPES[data.dtype],
        out_type=ROW_TYPES[query.dtype],
        portable=portable,
    )
    status = library.attend(ctypes.byref(task), torch.get_num_threads())
    if status == 1:
        raise ResourceError("no memory for attention", code="less-context")
    if status:
        raise ValueError("a sequence length does not fit its cache blocks")
    return out
