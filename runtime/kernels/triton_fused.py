"""The small steps between the products of a decoded token, as Triton device code.

Each begins where a product left off, with fp32 parts of its sum over K [count, rows, n] that it adds in order, and
ends where the next begins: with the scaled operand of `multiply_kernel`, or in the cache. What the plain model would
round to its dtype is rounded to it here. Knows no tensors; `triton_decode` launches.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton_activation import columns_of, natural_column, some_tiles, store_activation


@triton.jit
def _add_parts(parts, place, count, stride, inside):
    """The sum of `count` parts `stride` apart, in order, at `place`."""
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    source = parts + place
    for _ in tl.range(1, count):
        source += stride
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["count", "rows"])
def norm_kernel(
    parts,  # [count, rows, size]: what is added to the residual stream
    residual,  # [rows, size]
    gain,  # [size]
    stream,  # [rows, size]: the residual stream after it
    normed,  # [rows, size], unless `into`
    into,  # or None
    count,
    rows,
    size,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid (rows). Residual, then RMSNorm (arXiv 1910.07467)."""
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    column = natural_column(place, into is not None and into.PERMUTED)
    inside = column < size
    x = tl.load(residual + row * size + column, mask=inside, other=0.0)
    if ADD:
        added = _add_parts(parts, row * size + column, count, rows * size, inside).to(x.dtype)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(stream + row * size + column, x, mask=inside)
    wide = x.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    result = (wide * root * weight).to(x.dtype)
    if into is not None:
        grouped = result.to(tl.float32).reshape(BLOCK // into.TILE_K, into.TILE_K)
        tile = tl.arange(0, BLOCK // into.TILE_K)
        store_activation(grouped, row, tile, tile < into.tiles, into)
    else:
        tl.store(normed + row * size + column, result, mask=inside)


@triton.jit(do_not_specialize=["count", "rows"])
def silu_kernel(
    parts,  # [count, rows, 2 * size]: gate, up
    into,
    count,
    rows,
    size,
    DTYPE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid (rows, blocks of TILES tiles). SiLU(gate) * up."""
    row = tl.program_id(0)
    _, tile = some_tiles(tl.program_id(1) * TILES, 1, TILES)
    column = columns_of(tile, into)
    inside = column < size
    place = row * (2 * size) + column
    gate = _add_parts(parts, place, count, rows * size * 2, inside).to(DTYPE).to(tl.float32)
    up = _add_parts(parts, place + size, count, rows * size * 2, inside).to(DTYPE).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    store_activation((active * up).to(DTYPE).to(tl.float32), row, tile, tile < into.tiles, into)


@triton.jit
def _normed(first, second, gain, lane, half, present, eps, DTYPE: tl.constexpr):
    """RMSNorm over a head given as two halves."""
    root = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * half) + eps)
    low = tl.load(gain + lane, mask=present, other=0.0).to(tl.float32)
    high = tl.load(gain + half + lane, mask=present, other=0.0).to(tl.float32)
    return (first * root * low).to(DTYPE).to(tl.float32), (second * root * high).to(DTYPE).to(tl.float32)


@triton.jit
def _round(x):
    """To the nearest whole number, halves to even, below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["count", "rows", "tokens"])
def rope_kernel(
    parts,  # [count, rows, (heads + 2 * kv_heads) * head_dim]: query, key, value
    bias,  # [(heads + 2 * kv_heads) * head_dim], if BIAS
    query_gain,  # [head_dim], if NORM
    key_gain,
    cos,  # [positions, head_dim / 2]
    sin,
    lengths,  # int32 [sequences]: keys present once the new tokens are
    query,  # [rows, heads, head_dim]
    keys,  # [sequences, kv_heads, capacity, head_dim], sequence_stride and head_stride apart
    values,
    key_scales,  # fp32 [sequences, kv_heads, capacity], if INT8
    value_scales,
    count,
    rows,
    tokens,  # new ones of each sequence; row = sequence * tokens + token
    heads,
    kv_heads,
    sequence_stride,
    head_stride,
    capacity,
    eps,
    HALF: tl.constexpr,  # of head_dim
    BLOCK: tl.constexpr,  # a power of two, at least HALF
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    INT8: tl.constexpr,
):
    """Grid (rows, heads + 2 * kv_heads). Bias, norm of query and key, rotation; keys and values go into the cache."""
    row, head, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    sequence, present = row // tokens, lane < HALF
    DTYPE: tl.constexpr = query.dtype.element_ty
    position = tl.load(lengths + sequence) - tokens + row % tokens
    width = (heads + 2 * kv_heads) * (2 * HALF)
    place = row * width + head * (2 * HALF) + lane
    first = _add_parts(parts, place, count, rows * width, present).to(DTYPE).to(tl.float32)
    second = _add_parts(parts, place + HALF, count, rows * width, present).to(DTYPE).to(tl.float32)
    if BIAS:
        at = bias + head * (2 * HALF) + lane
        first = (first + tl.load(at, mask=present, other=0.0).to(tl.float32)).to(DTYPE).to(tl.float32)
        second = (second + tl.load(at + HALF, mask=present, other=0.0).to(tl.float32)).to(DTYPE).to(tl.float32)
    if head < heads + kv_heads:
        if NORM:
            gain = query_gain if head < heads else key_gain
            first, second = _normed(first, second, gain, lane, HALF, present, eps, DTYPE)
        c = tl.load(cos + position * HALF + lane, mask=present, other=0.0).to(tl.float32)
        s = tl.load(sin + position * HALF + lane, mask=present, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if head < heads:
        target = query + (row * heads + head) * (2 * HALF) + lane
        tl.store(target, first.to(DTYPE), mask=present)
        tl.store(target + HALF, second.to(DTYPE), mask=present)
    else:
        is_key = head < heads + kv_heads
        kv_head = tl.where(is_key, head - heads, head - heads - kv_heads)
        at = sequence.to(tl.int64) * sequence_stride + kv_head.to(tl.int64) * head_stride + position * (2 * HALF) + lane
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
        if INT8:
            largest = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
            scale = tl.maximum(largest / 127.0, 1e-30)
            first, second = _round(first / scale), _round(second / scale)
            scale_at = (sequence * kv_heads + kv_head).to(tl.int64) * capacity + position
            if is_key:
                tl.store(key_scales + scale_at, scale)
            else:
                tl.store(value_scales + scale_at, scale)
        if is_key:
            tl.store(keys + at, first.to(keys.dtype.element_ty), mask=present)
            tl.store(keys + at + HALF, second.to(keys.dtype.element_ty), mask=present)
        else:
            tl.store(values + at, first.to(values.dtype.element_ty), mask=present)
            tl.store(values + at + HALF, second.to(values.dtype.element_ty), mask=present)
