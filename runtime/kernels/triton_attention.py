"""Attention of few new tokens to a cache of keys and values, as Triton device code.

The keys of a sequence are split among programs, each of which keeps a running maximum and sum (flash decoding); a
second kernel combines them in a fixed order. Keys take the place of the MMA's rows, the queries that share a key-
value head (grouped heads, and the tokens of a speculation) are its columns. Positions and lengths are read from the
device, so a captured graph stays valid as the cache grows. Keys are reached block by block through one address, which
is where a table of blocks would step in. int8 keys and values carry one scale per token and head, applied to scores
and probabilities. Knows no tensors; `triton_decode` launches.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton_matmul import natural_column, store_activation


@triton.jit
def attend_kernel(
    query,  # [sequences, TOKENS, heads, HEAD_DIM]
    keys,  # [sequences, kv_heads, capacity, HEAD_DIM], sequence_stride and head_stride apart; int8 or as query
    values,
    key_scales,  # fp32 [sequences, kv_heads, capacity], for int8
    value_scales,
    lengths,  # int32 [sequences]: keys present, those of the new tokens included
    outputs,  # fp32 [sequences, kv_heads, splits, BLOCK_Q, HEAD_DIM]
    stats,  # fp32 [sequences, kv_heads, splits, BLOCK_Q, 2]: maximum and sum of exponentials, base 2
    sequence_stride,
    head_stride,
    capacity,
    window,
    scale,  # of the scores, times log2(e)
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a key-value head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    DOT: tl.constexpr,  # the type of what is multiplied
):
    """Grid (splits, kv_heads, sequences)."""
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, kv_heads = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(lengths + sequence)
    column = tl.arange(0, BLOCK_Q)
    token, lane = column // GROUP, tl.arange(0, BLOCK_D)
    position = length - TOKENS + token
    head = (sequence * TOKENS + token) * (kv_heads * GROUP) + kv_head * GROUP + column % GROUP
    q_mask = (column[:, None] < TOKENS * GROUP) & (lane[None, :] < HEAD_DIM)
    q = tl.load(query + head[:, None] * HEAD_DIM + lane[None, :], mask=q_mask, other=0.0).to(DOT)
    base = sequence.to(tl.int64) * sequence_stride + kv_head.to(tl.int64) * head_stride
    scale_base = (sequence * kv_heads + kv_head).to(tl.int64) * capacity
    first = tl.maximum(length - TOKENS - window + 1, 0) // BLOCK_K if WINDOW else 0
    blocks = tl.cdiv(length, BLOCK_K)
    each = tl.cdiv(blocks - first, splits)
    start = first + split * each
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_D, BLOCK_Q), tl.float32)
    for block in tl.range(start, tl.minimum(start + each, blocks)):
        key = block * BLOCK_K + tl.arange(0, BLOCK_K)
        place = base + block * tl.full((), BLOCK_K * HEAD_DIM, tl.int64)
        cell = tl.arange(0, BLOCK_K)[:, None] * HEAD_DIM + lane[None, :]
        present = (key[:, None] < length) & (lane[None, :] < HEAD_DIM)
        k = tl.load(keys + place + cell, mask=present, other=0)
        v = tl.load(values + place + cell, mask=present, other=0)
        score = tl.dot(k.to(DOT), q.trans()) * scale
        if INT8:
            score *= tl.load(key_scales + scale_base + key, mask=key < length, other=0.0)[:, None]
        seen = key[:, None] <= position[None, :]
        if WINDOW:
            seen = seen & (position[None, :] - key[:, None] < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        base_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base_top[None, :])
        shrink = tl.exp2(top - base_top)
        total = total * shrink + tl.sum(weight, axis=0)
        if INT8:
            weight *= tl.load(value_scales + scale_base + key, mask=key < length, other=0.0)[:, None]
        out = out * shrink[None, :] + tl.dot(v.to(DOT).trans(), weight.to(DOT))
        top = new_top
    part = ((sequence * kv_heads + kv_head) * splits + split) * BLOCK_Q + column
    tl.store(outputs + part[None, :] * HEAD_DIM + lane[:, None], out, mask=lane[:, None] < HEAD_DIM)
    tl.store(stats + part * 2, top)
    tl.store(stats + part * 2 + 1, total)


@triton.jit(do_not_specialize=["rows_kept"])
def combine_kernel(
    outputs,  # as `attend_kernel` wrote them
    stats,
    attended,  # [sequences * TOKENS, heads * HEAD_DIM]
    values,  # or, PREPARED, the operand of the product that follows
    sums,
    kv_heads,
    splits,
    tiles,
    rows_kept,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    TILE_K: tl.constexpr,
    PREPARED: tl.constexpr,
    PERMUTED: tl.constexpr,
):
    """Grid (sequences * TOKENS, heads / HEADS). PREPARED: HEAD_DIM is a power of two and HEADS of them whole tiles."""
    row, place = tl.program_id(0), tl.arange(0, HEADS * BLOCK_D)
    if PREPARED:
        place = natural_column(place, PERMUTED)
    head, lane = tl.program_id(1) * HEADS + place // BLOCK_D, place % BLOCK_D
    kv_head, column = head // GROUP, row % TOKENS * GROUP + head % GROUP
    inside = (lane < HEAD_DIM) & (kv_head < kv_heads)
    part = ((row // TOKENS * kv_heads + kv_head) * splits) * BLOCK_Q + column
    top = tl.full((HEADS * BLOCK_D,), float("-inf"), tl.float32)
    for split in tl.range(splits):
        top = tl.maximum(top, tl.load(stats + (part + split * BLOCK_Q) * 2, mask=inside, other=0.0))
    total = tl.zeros((HEADS * BLOCK_D,), tl.float32)
    out = tl.zeros((HEADS * BLOCK_D,), tl.float32)
    for split in tl.range(splits):
        one = part + split * BLOCK_Q
        weight = tl.exp2(tl.load(stats + one * 2, mask=inside, other=0.0) - top)
        total += weight * tl.load(stats + one * 2 + 1, mask=inside, other=1.0)
        out += weight * tl.load(outputs + one * HEAD_DIM + lane, mask=inside, other=0.0)
    result = (out / total).to(attended.dtype.element_ty)
    if PREPARED:
        TILES: tl.constexpr = HEADS * BLOCK_D // TILE_K
        tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
        grouped = tl.where(inside, result.to(tl.float32), 0.0).reshape(TILES, TILE_K)
        store_activation(grouped, row, tile, tiles, values, sums, rows_kept, TILE_K)
    else:
        tl.store(attended + (row * (kv_heads * GROUP) + head) * HEAD_DIM + lane, result, mask=inside)
