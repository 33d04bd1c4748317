"""The work after the qkv product: bias, head norms, rotary embedding, and the KV cache, one head at a time."""

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
from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, check_contiguous, launch_epilogue
from mycli.runtime.kernels.triton.product_sum import sum_parts
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts

# An epilogue of the product, which rounds where the plain pass rounds. Keys and values may be stored as int8 with a
# scale per token and head, or as int4 vectors. With a norm over all heads it is a launch of its own, because no program
# of the product sees all heads.


class RopeArguments(NamedTuple):
    """The arguments of `rope_epilogue`; absent parts are None."""

    bias: Any  # of the product, [(heads + 2 * kv_heads) * head_dim], or fewer rows with KEYS_ARE_VALUES
    query_gain: Any  # [head_dim], or [heads, head_dim] with `squares`
    key_gain: Any
    value_gain: Any  # [head_dim]
    cos: Any  # [positions, ROTARY]
    sin: Any
    query_scale: Any  # [positions]: multiplies queries
    lengths: Any  # int32 [sequences]: number of keys including the new tokens; 0 for a padding sequence
    counts: Any  # int32 [sequences]: new tokens of each sequence, if the last of its `tokens` are padding; else None
    block_table: Any  # int32 [sequences, table_width]
    query: Any  # [rows, heads, head_dim]
    key_cache: Any  # [blocks, kv_heads, block_size, head_dim], block_stride and head_stride apart
    value_cache: Any
    key_scales: Any  # int8: fp32 [blocks, kv_heads, block_size]; int4: bf16 [.., head_dim / 32]
    value_scales: Any
    squares: Any  # fp32 [heads of the product, padded rows]: sums of squares, if norms are over all heads
    rows_padded: Any
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
    ROTARY: Any  # rotated pairs of a head, at most HALF; the values after them stay
    INTERLEAVED: Any  # pairs are (2i, 2i + 1); the result is in the order of (i, i + ROTARY)
    NORM_LAST: Any  # norms follow the rotation
    HEADS: Any  # a power of two, at least the query heads; 1 without `squares`
    KEYS_ARE_VALUES: Any  # values are the keys before norm and rotation; the product has none


@triton.jit
def _columns(lane, rotates, args):
    """Return the columns of a head that each lane reads, in two halves, and those that it writes."""
    low, high = lane, lane + args.HALF
    if args.ROTARY < args.HALF:  # the values that stay are pairs (i, i + HALF - ROTARY) after the rotated ones
        low = tl.where(lane < args.ROTARY, lane, lane + args.ROTARY)
        high = tl.where(lane < args.ROTARY, lane + args.ROTARY, high)
    first, second = low, high
    if args.INTERLEAVED:
        paired = rotates & (lane < args.ROTARY)
        first, second = tl.where(paired, 2 * lane, low), tl.where(paired, 2 * lane + 1, high)
    return first, second, low, high


@triton.jit
def _mean_square(first, second, head, row, known, args):
    if args.squares is None:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * args.HALF)
    else:
        begin = tl.where(head < args.heads, 0, args.heads)
        count = tl.where(head < args.heads, args.heads, args.kv_heads)
        which = tl.arange(0, args.HEADS)[None, :]
        source = args.squares + (begin + which) * args.rows_padded + row[:, None]
        squares = tl.load(source, mask=known[:, None] & (which < count), other=0.0)
        mean = tl.sum(squares, axis=1) / (count * (2 * args.HALF))
    return mean


@triton.jit
def _norm_head(first, second, gain, mean, low, high, present, args, DTYPE: tl.constexpr):
    root = tl.rsqrt(mean + args.eps)[:, None]
    low = tl.load(gain + low, mask=present, other=0.0).to(tl.float32)[None, :]
    high = tl.load(gain + high, mask=present, other=0.0).to(tl.float32)[None, :]
    return (first * root * low).to(DTYPE).to(tl.float32), (second * root * high).to(DTYPE).to(tl.float32)


@triton.jit
def _norm_query_or_key(first, second, head, row, known, low, high, present, args, DTYPE: tl.constexpr):
    gain = args.query_gain if head < args.heads else args.key_gain
    if args.squares is not None:
        gain += tl.where(head < args.heads, head, head - args.heads) * (2 * args.HALF)
    mean = _mean_square(first, second, head, row, known, args)
    return _norm_head(first, second, gain, mean, low, high, present, args, DTYPE)


@triton.jit
def _store_int4_halves(first, second, cache, scales, row, vector, position, known, args):
    # A Hadamard transform of the whole head: of each half, then one butterfly between the halves.
    HALF: tl.constexpr = args.HALF
    ROWS: tl.constexpr = args.ROWS
    FACTOR: tl.constexpr = (2 * HALF) ** -0.5
    low, high = hadamard_rows(first, ROWS, HALF), hadamard_rows(second, ROWS, HALF)
    codes, steps = row + position * HALF, vector * (HALF // 16)
    store_int4((low + high) * FACTOR, cache, scales, codes, steps, known, ROWS, HALF)
    store_int4((low - high) * FACTOR, cache, scales, codes + HALF // 2, steps + HALF // 32, known, ROWS, HALF)


@triton.jit
def _store_cache(first, second, cache, scales, head, page, position, low, high, known, inside, args):
    """Store both halves [rows, BLOCK] of keys or values in their cache, quantized if it is int4 or has scales.

    page, position: [rows], the cache block and the place in it.
    """
    row = page.to(tl.int64) * args.block_stride + head.to(tl.int64) * args.head_stride
    at = (page * args.kv_heads + head).to(tl.int64) * args.block_size + position
    if cache.dtype.element_ty == tl.uint8:
        _store_int4_halves(first, second, cache, scales, row, at, position, known, args)
        return
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = tl.maximum(largest / 127.0, 1e-30)
        first, second = round_whole(first / scale[:, None]), round_whole(second / scale[:, None])
        tl.store(scales + at, scale, mask=known)
    target = cache + (row + position * (2 * args.HALF))[:, None]
    tl.store(target + low[None, :], first.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + high[None, :], second.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def _finish_value(first, second, value, page, offset, low, high, cached, stored, present, args):
    DTYPE: tl.constexpr = args.query.dtype.element_ty
    if args.value_gain is not None:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * args.HALF)
        first, second = _norm_head(first, second, args.value_gain, mean, low, high, present, args, DTYPE)
    _store_cache(
        first, second, args.value_cache, args.value_scales, value, page, offset, low, high, cached, stored, args
    )


@triton.jit
def rope_epilogue(parts, count, head, first_row, rows, args):
    """Finish one head of query, key or value: bias, norm and rotation; store keys and values."""
    row, lane = first_row + tl.arange(0, args.ROWS), tl.arange(0, args.BLOCK)
    known, present = row < rows, lane < args.HALF
    sequence = row // args.tokens
    DTYPE: tl.constexpr = args.query.dtype.element_ty
    position = tl.load(args.lengths + sequence, mask=known, other=0) - args.tokens + row % args.tokens
    cached = known & (position >= 0)  # not of a padding sequence
    if args.counts is not None:
        cached = cached & (row % args.tokens < tl.load(args.counts + sequence, mask=known, other=0))
    inside, stored = known[:, None] & present[None, :], cached[:, None] & present[None, :]
    width = (args.heads + (1 if args.KEYS_ARE_VALUES else 2) * args.kv_heads) * (2 * args.HALF)
    rotates = head < args.heads + args.kv_heads
    source, other, low, high = _columns(lane, rotates, args)
    place = row[:, None] * width + head * (2 * args.HALF)
    # All that does not depend on the product is loaded before its parts: one latency instead of three.
    entry = args.block_table + sequence * args.table_width + position // args.block_size
    page, offset = tl.load(entry, mask=cached & (head >= args.heads), other=0), position % args.block_size
    if args.cos is not None:
        at, rotated = position[:, None] * args.ROTARY + lane[None, :], stored & (lane < args.ROTARY)[None, :] & rotates
        c = tl.load(args.cos + at, mask=rotated, other=1.0).to(tl.float32)
        s = tl.load(args.sin + at, mask=rotated, other=0.0).to(tl.float32)
    first = add_parts(parts, place + source[None, :], count, rows * width, inside).to(DTYPE).to(tl.float32)
    second = add_parts(parts, place + other[None, :], count, rows * width, inside).to(DTYPE).to(tl.float32)
    if args.bias is not None:
        bias = args.bias + head * (2 * args.HALF)
        bias_low = tl.load(bias + source, mask=present, other=0.0).to(tl.float32)[None, :]
        bias_high = tl.load(bias + other, mask=present, other=0.0).to(tl.float32)[None, :]
        first, second = (first + bias_low).to(DTYPE).to(tl.float32), (second + bias_high).to(DTYPE).to(tl.float32)
    if args.KEYS_ARE_VALUES:  # noqa: SIM102  (reason: the constant must decide what is compiled)
        if head >= args.heads:
            _finish_value(first, second, head - args.heads, page, offset, low, high, cached, stored, present, args)
    if rotates:
        if args.query_gain is not None and not args.NORM_LAST:
            first, second = _norm_query_or_key(
                first, second, head, row, known, source, other, present, args, DTYPE
            )  # fmt: skip
        if args.cos is not None:
            first, second = first * c - second * s, second * c + first * s
        if args.query_gain is not None and args.NORM_LAST:
            first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
            first, second = _norm_query_or_key(first, second, head, row, known, low, high, present, args, DTYPE)
    first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
    if head < args.heads:
        if args.query_scale is not None:
            factor = tl.load(args.query_scale + position, mask=cached, other=1.0).to(tl.float32)[:, None]
            first, second = first * factor, second * factor
        target = args.query + (row[:, None] * args.heads + head) * (2 * args.HALF)
        tl.store(target + low[None, :], first.to(DTYPE), mask=inside)
        tl.store(target + high[None, :], second.to(DTYPE), mask=inside)
    elif head < args.heads + args.kv_heads:
        key = head - args.heads
        _store_cache(first, second, args.key_cache, args.key_scales, key, page, offset, low, high, cached, stored, args)
    else:
        value = head - args.heads - args.kv_heads
        _finish_value(first, second, value, page, offset, low, high, cached, stored, present, args)


@dataclass(frozen=True)
class Projection:
    """The bias of the qkv product and the gains of its norms; None for those that a layer does not have.

    Gains of queries and keys are [head_dim], or over all heads [heads, head_dim] if `all_heads`.
    """

    heads: int
    bias: Tensor | None = None
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    value_gain: Tensor | None = None
    eps: float = 0.0
    norm_last: bool = False
    all_heads: bool = False
    keys_are_values: bool = False


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [positions, rotated pairs], and a factor for queries [positions] if they are scaled."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    query_scale: Tensor | None = None


def project(
    x: Activation,
    product: FewRowsProduct,
    projection: Projection,
    rotation: Rotation | None,
    lengths: Tensor,
    block_table: Tensor,
    cache: LayerCache,
    dtype: torch.dtype,
    counters: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """Return rotated queries [sequences, tokens, heads, head_dim]; append keys and values to the cache.

    product: (heads + 2 * kv_heads) * head_dim rows, kv_heads fewer heads if keys are values. rotation: None rotates
    nothing. lengths: int32 [sequences], keys including the new tokens, 0 for padding, which is not stored. block_table:
    int32 [sequences, blocks]. counters: int32 zeros, at least one per head. counts: int32 [sequences], new tokens of
    each sequence; its rows after them are not stored. Raises ValueError for int4 vectors of which only a part rotates.
    """
    gains = projection.query_gain, projection.key_gain, projection.value_gain
    check_contiguous(lengths, counts, block_table, projection.bias, *gains)
    cos, sin, query_scale = (None,) * 3 if rotation is None else (rotation.cos, rotation.sin, rotation.query_scale)
    check_contiguous(cos, sin, query_scale)
    (sequences, width), rows, head_dim = block_table.shape, x.values.shape[0], cache.head_dim
    kv_heads, block_size = cache.keys.shape[1:3]
    heads, half = projection.heads, head_dim // 2
    rotary = half if rotation is None else rotation.cos.shape[1]
    block, total = triton.next_power_of_2(half), heads + (1 if projection.keys_are_values else 2) * kv_heads
    if product.n != total * head_dim or rows % sequences or rotary > half:
        raise ValueError(f"product of {product.n} rows, {rotary} rotated pairs, cache {tuple(cache.keys.shape)}")
    if cache.keys.dtype is torch.uint8 and rotary < half:
        raise ValueError(f"int4 vectors of {head_dim} with {rotary} rotated pairs")
    query = torch.empty((sequences, rows // sequences, heads, head_dim), dtype=dtype, device=lengths.device)
    projected, squares, at_once = None, None, x.tile.rows_at_once(rows)
    if projection.all_heads:
        projected, squares = sum_parts(x, product, dtype, head_dim, counters, projection.bias)
        at_once = 1
    args = RopeArguments(
        None if projection.all_heads else projection.bias, *gains,
        cos, sin, query_scale, lengths, counts, block_table, query, cache.keys, cache.values,
        cache.key_scales, cache.value_scales, squares, 0 if squares is None else squares.shape[1],
        rows // sequences, heads, kv_heads, cache.keys.stride(0), cache.keys.stride(1), block_size, width,
        projection.eps,
        constexpr(half), constexpr(block), constexpr(at_once), constexpr(rotary),
        constexpr(rotation is not None and rotation.interleaved), constexpr(projection.norm_last),
        constexpr(triton.next_power_of_2(heads) if projection.all_heads else 1), constexpr(projection.keys_are_values),
    )  # fmt: skip
    epilogue = Epilogue(rope_epilogue, counters, args, constexpr(head_dim), constexpr(1))
    if projected is None:
        product.partial(x, epilogue=epilogue)
    else:
        launch_epilogue(projected[None], epilogue, product.chip.pdl)
    return query
