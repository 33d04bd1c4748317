"""What is done with the products of a decoded token, as Triton device code: the tails of `multiply_kernel`.

Each takes one piece of a product as fp32 parts of its sum over K [count, rows, n], adds them in order, and leaves the
operand of the next product, or queries and a longer cache. What the plain model would round to its dtype is rounded to
it here, but for the norm: its operand is the residual stream times the gain, and the product that takes it divides by
the root (`Root`), so that no program has to see a whole row. Knows no tensors; `triton.decode` launches.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.activation import columns_of, some_tiles, store_activation
from mycli.runtime.kernels.triton.pdl import take_over


@triton.jit
def _add_parts(parts, place, count, stride, inside):
    """The sum of `count` parts `stride` apart, in order, at `place`; four loads are under way at a time."""
    total = tl.zeros(place.shape, tl.float32)
    for first in tl.range(0, count, 4):
        for part in tl.static_range(4):
            source = parts + place + (first + part) * stride
            total += tl.load(source, mask=inside & (first + part < count), other=0.0, cache_modifier=".cg")
    return total


class Normed(NamedTuple):
    """Where the residual stream goes: into itself, and, weighed, into a product. `into` None: only the first."""

    stream: Any  # [rows, size]
    size: Any
    gain: Any  # [size]
    squares: Any  # fp32 [pieces, rows]
    into: Any
    ROWS: Any  # a power of two, at least the rows
    TILES: Any  # of a piece


@triton.jit
def _weigh(x, row, tile, column, inside, piece, rows, given):
    """The stream x [tiles at hand, TILE_K] times the gain as an operand, and its sums of squares over the piece."""
    wide = x.to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, axis=1).reshape(given.ROWS, given.TILES), axis=1)
    each = tl.arange(0, given.ROWS)
    tl.store(given.squares + piece * rows + each, squares, mask=each < rows)
    gain = tl.load(given.gain + column, mask=inside, other=0.0).to(tl.float32)
    store_activation(wide * gain, row, tile, (row < rows) & (tile < given.into.tiles), given.into)


@triton.jit
def add_tail(parts, count, piece, rows, given):
    """The residual stream with the product added, and from it the operand of the next."""
    row, tile = some_tiles(piece * given.TILES, given.ROWS, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    place = row[:, None] * given.size + column
    x = tl.load(given.stream + place, mask=inside, other=0.0)
    added = _add_parts(parts, place, count, rows * given.size, inside).to(x.dtype)
    x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    tl.store(given.stream + place, x, mask=inside)
    if given.gain is not None:
        _weigh(x, row, tile, column, inside, piece, rows, given)


@triton.jit
def embed_kernel(tokens, embedding, rows, given, OVERLAP: tl.constexpr):
    """Grid (pieces). The residual stream begins: rows of `embedding` [vocab, size] for int64 tokens [rows]."""
    if OVERLAP:
        take_over()
    piece = tl.program_id(0)
    row, tile = some_tiles(piece * given.TILES, given.ROWS, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    token = tl.load(tokens + row, mask=row < rows, other=0)
    x = tl.load(embedding + token[:, None] * given.size + column, mask=inside, other=0.0)
    tl.store(given.stream + row[:, None] * given.size + column, x, mask=inside)
    _weigh(x, row, tile, column, inside, piece, rows, given)


class Gated(NamedTuple):
    """Where SiLU(gate) * up goes."""

    size: Any  # of gate, and of up
    into: Any
    ROWS: Any
    TILES: Any
    DTYPE: Any  # the plain model's


@triton.jit
def silu_tail(parts, count, piece, rows, given):
    """SiLU(gate) * up from parts [count, rows, 2 * size]: gate, up."""
    row, tile = some_tiles(piece * given.TILES, given.ROWS, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    place, stride = row[:, None] * (2 * given.size) + column, rows * given.size * 2
    gate = _add_parts(parts, place, count, stride, inside).to(given.DTYPE).to(tl.float32)
    up = _add_parts(parts, place + given.size, count, stride, inside).to(given.DTYPE).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(given.DTYPE).to(tl.float32)
    value = (active * up).to(given.DTYPE).to(tl.float32)
    store_activation(value, row, tile, (row < rows) & (tile < given.into.tiles), given.into)


class Rotated(NamedTuple):
    """Where queries, keys and values go; what is None is not there."""

    bias: Any  # [(heads + 2 * kv_heads) * head_dim]
    query_gain: Any  # [head_dim]
    key_gain: Any
    cos: Any  # [positions, head_dim / 2]
    sin: Any
    lengths: Any  # int32 [sequences]: keys present once the new tokens are
    query: Any  # [rows, heads, head_dim]
    key_cache: Any  # [sequences, kv_heads, capacity, head_dim], sequence_stride and head_stride apart
    value_cache: Any
    key_scales: Any  # fp32 [sequences, kv_heads, capacity], for int8
    value_scales: Any
    tokens: Any  # new ones of each sequence; row = sequence * tokens + token
    heads: Any
    kv_heads: Any
    sequence_stride: Any
    head_stride: Any
    capacity: Any
    eps: Any
    HALF: Any  # of head_dim
    BLOCK: Any  # a power of two, at least HALF
    ROWS: Any


@triton.jit
def _norm_head(first, second, gain, lane, present, given, DTYPE: tl.constexpr):
    """RMSNorm over heads given as two halves [rows, BLOCK]."""
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * given.HALF)
    root = tl.rsqrt(mean + given.eps)[:, None]
    low = tl.load(gain + lane, mask=present, other=0.0).to(tl.float32)[None, :]
    high = tl.load(gain + given.HALF + lane, mask=present, other=0.0).to(tl.float32)[None, :]
    return (first * root * low).to(DTYPE).to(tl.float32), (second * root * high).to(DTYPE).to(tl.float32)


@triton.jit
def _round(x):
    """To the nearest whole number, halves to even, below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _keep(first, second, cache, scales, head, sequence, position, lane, known, inside, given):
    """Halves of keys or of values [rows, BLOCK] into their cache, as int8 with a scale where there are scales."""
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = tl.maximum(largest / 127.0, 1e-30)
        first, second = _round(first / scale[:, None]), _round(second / scale[:, None])
        at = (sequence * given.kv_heads + head).to(tl.int64) * given.capacity + position
        tl.store(scales + at, scale, mask=known)
    row = sequence.to(tl.int64) * given.sequence_stride + head.to(tl.int64) * given.head_stride
    target = cache + (row + position * (2 * given.HALF))[:, None] + lane[None, :]
    tl.store(target, first.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + given.HALF, second.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def rope_tail(parts, count, head, rows, given):
    """One head of query, key and value: bias, norm of query and key, rotation; keys and values go into the cache."""
    row, lane = tl.arange(0, given.ROWS), tl.arange(0, given.BLOCK)
    known, present = row < rows, lane < given.HALF
    inside = known[:, None] & present[None, :]
    sequence = row // given.tokens
    DTYPE: tl.constexpr = given.query.dtype.element_ty
    position = tl.load(given.lengths + sequence, mask=known, other=0) - given.tokens + row % given.tokens
    width = (given.heads + 2 * given.kv_heads) * (2 * given.HALF)
    place = row[:, None] * width + head * (2 * given.HALF) + lane[None, :]
    first = _add_parts(parts, place, count, rows * width, inside).to(DTYPE).to(tl.float32)
    second = _add_parts(parts, place + given.HALF, count, rows * width, inside).to(DTYPE).to(tl.float32)
    if given.bias is not None:
        bias = given.bias + head * (2 * given.HALF) + lane
        low = tl.load(bias, mask=present, other=0.0).to(tl.float32)[None, :]
        high = tl.load(bias + given.HALF, mask=present, other=0.0).to(tl.float32)[None, :]
        first, second = (first + low).to(DTYPE).to(tl.float32), (second + high).to(DTYPE).to(tl.float32)
    if head < given.heads + given.kv_heads:
        if given.query_gain is not None:
            gain = given.query_gain if head < given.heads else given.key_gain
            first, second = _norm_head(first, second, gain, lane, present, given, DTYPE)
        at = position[:, None] * given.HALF + lane[None, :]
        c = tl.load(given.cos + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(given.sin + at, mask=inside, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if head < given.heads:
        target = given.query + (row[:, None] * given.heads + head) * (2 * given.HALF) + lane[None, :]
        tl.store(target, first.to(DTYPE), mask=inside)
        tl.store(target + given.HALF, second.to(DTYPE), mask=inside)
    else:
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
        key = head - given.heads
        if key < given.kv_heads:
            _keep(first, second, given.key_cache, given.key_scales, key, sequence, position, lane, known, inside, given)
        else:
            value = key - given.kv_heads
            _keep(
                first, second, given.value_cache, given.value_scales, value, sequence, position, lane, known, inside,
                given,
            )  # fmt: skip
