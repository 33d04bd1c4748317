"""The epilogue of the qkv product: bias, head norms, rotary embedding, and the KV cache, one head at a time."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.kernels.triton.int4_cache import hadamard_rows, round_whole, store_int4
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts

# Rounds where the plain pass rounds. Keys and values may be stored as int8 with a scale per token and head, or as
# int4 vectors.


class RopeArguments(NamedTuple):
    """The epilogue's arguments; absent parts are None."""

    bias: Any  # [(heads + 2 * kv_heads) * head_dim]
    query_gain: Any  # [head_dim]
    key_gain: Any
    cos: Any  # [positions, head_dim / 2]
    sin: Any
    lengths: Any  # int32 [sequences]: number of keys including the new tokens; 0 for a padding sequence
    block_table: Any  # int32 [sequences, table_width]
    query: Any  # [rows, heads, head_dim]
    key_cache: Any  # [blocks, kv_heads, block_size, head_dim], block_stride and head_stride apart
    value_cache: Any
    key_scales: Any  # int8: fp32 [blocks, kv_heads, block_size]; int4: the cache itself as bf16
    value_scales: Any
    tokens: Any  # new tokens per sequence; row = sequence * tokens + token
    heads: Any
    kv_heads: Any
    block_stride: Any
    head_stride: Any
    block_size: Any
    table_width: Any
    eps: Any
    HALF: Any  # head_dim / 2
    BLOCK: Any  # a power of two, at least HALF
    ROWS: Any  # rows at a time


@triton.jit
def _norm_head(first, second, gain, lane, present, args, DTYPE: tl.constexpr):
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * args.HALF)
    root = tl.rsqrt(mean + args.eps)[:, None]
    low = tl.load(gain + lane, mask=present, other=0.0).to(tl.float32)[None, :]
    high = tl.load(gain + args.HALF + lane, mask=present, other=0.0).to(tl.float32)[None, :]
    return (first * root * low).to(DTYPE).to(tl.float32), (second * root * high).to(DTYPE).to(tl.float32)


@triton.jit
def _store_int4_halves(first, second, cache, scales, row, position, known, args):
    # Each half of a head is rotated alone, then both together.
    HALF: tl.constexpr = args.HALF
    ROWS: tl.constexpr = args.ROWS
    FACTOR: tl.constexpr = (2 * HALF) ** -0.5
    low, high = hadamard_rows(first, ROWS, HALF), hadamard_rows(second, ROWS, HALF)
    codes = row + position * (HALF + HALF // 8)
    steps = codes + HALF
    store_int4((low + high) * FACTOR, cache, scales, codes, steps, known, ROWS, HALF)
    store_int4((low - high) * FACTOR, cache, scales, codes + HALF // 2, steps + HALF // 16, known, ROWS, HALF)


@triton.jit
def _store_cache(first, second, cache, scales, head, page, position, lane, known, inside, args):
    """Store both halves [rows, BLOCK] of keys or values in their cache, quantized if it is int4 or has scales.

    page, position: [rows], the cache block and the place in it.
    """
    row = page.to(tl.int64) * args.block_stride + head.to(tl.int64) * args.head_stride
    if cache.dtype.element_ty == tl.uint8:
        _store_int4_halves(first, second, cache, scales, row, position, known, args)
        return
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = tl.maximum(largest / 127.0, 1e-30)
        first, second = round_whole(first / scale[:, None]), round_whole(second / scale[:, None])
        at = (page * args.kv_heads + head).to(tl.int64) * args.block_size + position
        tl.store(scales + at, scale, mask=known)
    target = cache + (row + position * (2 * args.HALF))[:, None] + lane[None, :]
    tl.store(target, first.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + args.HALF, second.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def rope_epilogue(parts, count, head, first_row, rows, args):
    """Finish one head of query, key or value: bias, norm and rotation of query and key; store keys and values."""
    row, lane = first_row + tl.arange(0, args.ROWS), tl.arange(0, args.BLOCK)
    known, present = row < rows, lane < args.HALF
    sequence = row // args.tokens
    DTYPE: tl.constexpr = args.query.dtype.element_ty
    position = tl.load(args.lengths + sequence, mask=known, other=0) - args.tokens + row % args.tokens
    cached = known & (position >= 0)  # not of a padding sequence
    inside, stored = known[:, None] & present[None, :], cached[:, None] & present[None, :]
    width = (args.heads + 2 * args.kv_heads) * (2 * args.HALF)
    place = row[:, None] * width + head * (2 * args.HALF) + lane[None, :]
    first = add_parts(parts, place, count, rows * width, inside).to(DTYPE).to(tl.float32)
    second = add_parts(parts, place + args.HALF, count, rows * width, inside).to(DTYPE).to(tl.float32)
    if args.bias is not None:
        bias = args.bias + head * (2 * args.HALF) + lane
        low = tl.load(bias, mask=present, other=0.0).to(tl.float32)[None, :]
        high = tl.load(bias + args.HALF, mask=present, other=0.0).to(tl.float32)[None, :]
        first, second = (first + low).to(DTYPE).to(tl.float32), (second + high).to(DTYPE).to(tl.float32)
    if head < args.heads + args.kv_heads:
        if args.query_gain is not None:
            gain = args.query_gain if head < args.heads else args.key_gain
            first, second = _norm_head(first, second, gain, lane, present, args, DTYPE)
        at = position[:, None] * args.HALF + lane[None, :]
        c = tl.load(args.cos + at, mask=stored, other=0.0).to(tl.float32)
        s = tl.load(args.sin + at, mask=stored, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if head < args.heads:
        target = args.query + (row[:, None] * args.heads + head) * (2 * args.HALF) + lane[None, :]
        tl.store(target, first.to(DTYPE), mask=inside)
        tl.store(target + args.HALF, second.to(DTYPE), mask=inside)
    else:
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
        key = head - args.heads
        entry = args.block_table + sequence * args.table_width + position // args.block_size
        page, offset = tl.load(entry, mask=cached, other=0), position % args.block_size
        if key < args.kv_heads:
            _store_cache(first, second, args.key_cache, args.key_scales, key, page, offset, lane, cached, stored, args)
        else:
            value = key - args.kv_heads
            _store_cache(
                first, second, args.value_cache, args.value_scales, value, page, offset, lane, cached, stored, args
            )


@dataclass(frozen=True)
class Projection:
    """The bias of qkv and the gains of head norms that a layer has, if any."""

    heads: int
    bias: Tensor | None = None
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    eps: float = 0.0


def project(
    x: Activation,
    product: TritonMatmul,
    projection: Projection,
    tables: tuple[Tensor, Tensor],
    lengths: Tensor,
    block_table: Tensor,
    cache: LayerCache,
    dtype: torch.dtype,
    counters: Tensor,
) -> Tensor:
    """Return rotated queries [sequences, tokens, heads, head_dim]; append keys and values to the cache.

    product: (heads + 2 * kv_heads) * head_dim rows. tables: cos and sin [positions, head_dim / 2]. lengths: int32
    [sequences], keys including the new tokens, 0 for padding, which is not stored. block_table: int32 [sequences,
    blocks]. counters: int32 zeros, at least one per head.
    """
    check_contiguous(*tables, lengths, block_table, projection.bias, projection.query_gain, projection.key_gain)
    (sequences, width), rows, head_dim = block_table.shape, x.values.shape[0], cache.head_dim
    kv_heads, block_size = cache.keys.shape[1:3]
    heads, half = projection.heads, head_dim // 2
    block = triton.next_power_of_2(half)
    if product.n != (heads + 2 * kv_heads) * head_dim or rows % sequences or tables[0].shape[1] != half:
        raise ValueError(
            f"product of {product.n} rows, tables {tuple(tables[0].shape)}, cache {tuple(cache.keys.shape)}"
        )
    query = torch.empty((sequences, rows // sequences, heads, head_dim), dtype=dtype, device=lengths.device)
    args = RopeArguments(
        projection.bias, projection.query_gain, projection.key_gain, tables[0], tables[1], lengths, block_table,
        query, cache.keys, cache.values, *cache.scales(),
        rows // sequences, heads, kv_heads, cache.keys.stride(0), cache.keys.stride(1), block_size, width,
        projection.eps,
        constexpr(half), constexpr(block), constexpr(x.tile.rows_at_once(rows, 2 * block)),
    )  # fmt: skip
    product.partial(x, epilogue=Epilogue(rope_epilogue, counters, args, constexpr(head_dim), constexpr(1)))
    return query
