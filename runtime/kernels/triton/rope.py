"""From the product of q, k and v to rotated queries and a longer cache, a head at a time.

Bias, norm over a head and rotation are rounded where the plain model rounds them; keys and values may be stored as
int8 with a scale per token and head, or as int4 vectors.
"""

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
    key_scales: Any  # fp32 [sequences, kv_heads, capacity], for int8; for int4 the cache itself, in bf16
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
    ROWS: Any  # at a time


@triton.jit
def _norm_head(first, second, gain, lane, present, given, DTYPE: tl.constexpr):
    """RMSNorm over heads given as two halves [rows, BLOCK]."""
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * given.HALF)
    root = tl.rsqrt(mean + given.eps)[:, None]
    low = tl.load(gain + lane, mask=present, other=0.0).to(tl.float32)[None, :]
    high = tl.load(gain + given.HALF + lane, mask=present, other=0.0).to(tl.float32)[None, :]
    return (first * root * low).to(DTYPE).to(tl.float32), (second * root * high).to(DTYPE).to(tl.float32)


@triton.jit
def _keep_int4(first, second, cache, scales, row, position, known, given):
    """As int4 vectors, whose head is a power of two: each half is rotated by itself, then both together."""
    HALF: tl.constexpr = given.HALF
    ROWS: tl.constexpr = given.ROWS
    FACTOR: tl.constexpr = (2 * HALF) ** -0.5
    low, high = hadamard_rows(first, ROWS, HALF), hadamard_rows(second, ROWS, HALF)
    codes = row + position * (HALF + HALF // 8)
    steps = codes + HALF
    store_int4((low + high) * FACTOR, cache, scales, codes, steps, known, ROWS, HALF)
    store_int4((low - high) * FACTOR, cache, scales, codes + HALF // 2, steps + HALF // 16, known, ROWS, HALF)


@triton.jit
def _keep(first, second, cache, scales, head, sequence, position, lane, known, inside, given):
    """Halves of keys or of values [rows, BLOCK] into their cache, as int4 vectors or int8 where there are scales."""
    row = sequence.to(tl.int64) * given.sequence_stride + head.to(tl.int64) * given.head_stride
    if cache.dtype.element_ty == tl.uint8:
        _keep_int4(first, second, cache, scales, row, position, known, given)
        return
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = tl.maximum(largest / 127.0, 1e-30)
        first, second = round_whole(first / scale[:, None]), round_whole(second / scale[:, None])
        at = (sequence * given.kv_heads + head).to(tl.int64) * given.capacity + position
        tl.store(scales + at, scale, mask=known)
    target = cache + (row + position * (2 * given.HALF))[:, None] + lane[None, :]
    tl.store(target, first.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + given.HALF, second.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def rope_epilogue(parts, count, head, first_row, rows, given):
    """One head of query, key and value: bias, norm of query and key, rotation; keys and values go into the cache."""
    row, lane = first_row + tl.arange(0, given.ROWS), tl.arange(0, given.BLOCK)
    known, present = row < rows, lane < given.HALF
    inside = known[:, None] & present[None, :]
    sequence = row // given.tokens
    DTYPE: tl.constexpr = given.query.dtype.element_ty
    position = tl.load(given.lengths + sequence, mask=known, other=0) - given.tokens + row % given.tokens
    width = (given.heads + 2 * given.kv_heads) * (2 * given.HALF)
    place = row[:, None] * width + head * (2 * given.HALF) + lane[None, :]
    first = add_parts(parts, place, count, rows * width, inside).to(DTYPE).to(tl.float32)
    second = add_parts(parts, place + given.HALF, count, rows * width, inside).to(DTYPE).to(tl.float32)
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


@dataclass(frozen=True)
class Projection:
    """What a layer does to query and key before attention. Gains of the norms over a head, and the bias, if any."""

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
    cache: LayerCache,
    dtype: torch.dtype,
    counters: Tensor,
) -> Tensor:
    """Queries [sequences, tokens, heads, head_dim], rotated; keys and values go to the end of the cache.

    product: of (heads + 2 * kv_heads) * head_dim rows; tables: cosines and sines [positions, head_dim / 2];
    lengths: int32 [sequences], the keys present once the new tokens are; counters: int32 zeros, one a head at least.
    """
    check_contiguous(*tables, lengths, projection.bias, projection.query_gain, projection.key_gain)
    (sequences, kv_heads, capacity, _), rows, head_dim = cache.keys.shape, x.values.shape[0], cache.head_dim
    heads, half = projection.heads, head_dim // 2
    block = triton.next_power_of_2(half)
    if product.n != (heads + 2 * kv_heads) * head_dim or rows % sequences or tables[0].shape[1] != half:
        raise ValueError(f"{product.n} rows, tables {tuple(tables[0].shape)}, cache {tuple(cache.keys.shape)}")
    query = torch.empty((sequences, rows // sequences, heads, head_dim), dtype=dtype, device=lengths.device)
    given = Rotated(
        projection.bias, projection.query_gain, projection.key_gain, tables[0], tables[1], lengths, query,
        cache.keys, cache.values, *cache.scales(),
        rows // sequences, heads, kv_heads, cache.keys.stride(0), cache.keys.stride(1), capacity, projection.eps,
        constexpr(half), constexpr(block), constexpr(x.tile.rows_at_once(rows, 2 * block)),
    )  # fmt: skip
    product.partial(x, epilogue=Epilogue(rope_epilogue, counters, given, constexpr(head_dim), constexpr(1)))
    return query
