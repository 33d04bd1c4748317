"""Attention of few new tokens to a cache of keys and values, as Triton device code.

The keys of a sequence are split among programs, each of which keeps a running maximum and sum (flash decoding); the
last to finish combines them in a fixed order into the operand of the product that follows. Keys take the place of the
MMA's rows, the queries that share a key-value head (grouped heads, and the tokens of a speculation) are its columns.
Positions and lengths are read from the device, so a captured graph stays valid as the cache grows. Keys are reached
block by block through one address, which is where a table of blocks would step in. int8 keys and values carry one scale
per token and head, applied to scores and probabilities; int4 vectors are multiplied in the rotation they lie in.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.kernels.triton.int4_cache import (
    hadamard_rows,
    load_int4,
    lower_and_upper,
    whole_rows,
)
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.pdl import pdl_wait
from mycli.runtime.kernels.triton.product.activation import columns_of, some_tiles, store_activation
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.kernels.triton.split_k import last_to_arrive

BLOCK_K = 64  # keys of one turn of the loop
MOST_QUERIES = 64  # of one program: tokens times the heads that share a key-value head
_MOST_SPLITS = 64


@triton.jit(noinline=True)  # or its addresses take registers from the loop
def _combine(
    outputs,  # of one lot: fp32 [kv_heads, splits, BLOCK_Q, HEAD_DIM], and stats [.., 2]
    stats,
    row,  # of the first token
    tokens,
    tile,  # the first of TILES
    end,  # of the tiles whose heads are done
    heads,
    splits,
    into,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least the tokens
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,  # read at a time
    DTYPE: tl.constexpr,
):
    """Adds the splits of some heads in order; a split that saw no key has a maximum of -inf."""
    token, tile = some_tiles(0, tile, ROWS, TILES)
    present = (token < tokens) & (tile < end)
    column = columns_of(tile, into)
    head, lane = column // HEAD_DIM, column % HEAD_DIM
    inside = (present[:, None] & (head < heads))[None]
    place = head // GROUP * splits * BLOCK_Q + token[:, None] * GROUP + head % GROUP
    top = tl.full(place.shape, float("-inf"), tl.float32)
    total = tl.zeros(place.shape, tl.float32)
    out = tl.zeros(place.shape, tl.float32)
    for first in tl.range(0, splits, SPLITS):
        split = (first + tl.arange(0, SPLITS))[:, None, None]
        one, some = place[None] + split * BLOCK_Q, inside & (split < splits)
        tops = tl.load(stats + one * 2, mask=some, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + one * 2 + 1, mask=some, other=0.0, cache_modifier=".cg")
        outs = tl.load(outputs + one * HEAD_DIM + lane[None], mask=some, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - base), tl.exp2(tops - base[None])
        total = total * shrink + tl.sum(weight * totals, axis=0)
        out = out * shrink + tl.sum(weight * outs, axis=0)
        top = new_top
    result = tl.where(present[:, None] & (head < heads), out / total, 0.0).to(DTYPE).to(tl.float32)
    store_activation(result, row + token, tile, present, into)


@triton.jit(do_not_specialize=["tokens"])
def attend_kernel(
    query,  # [sequences, tokens, heads, HEAD_DIM]
    keys,  # [sequences, kv_heads, capacity, HEAD_DIM], sequence_stride and head_stride apart; int8, int4 or as query
    values,
    key_scales,  # fp32 [sequences, kv_heads, capacity] for int8, the cache in bf16 for int4, else None
    value_scales,
    lengths,  # int32 [sequences]: keys present, those of the new tokens included
    outputs,  # fp32 [lots, kv_heads, splits, BLOCK_Q, HEAD_DIM]
    stats,  # fp32 [lots, kv_heads, splits, BLOCK_Q, 2]: maximum and sum of exponentials, base 2
    sequence_stride,
    head_stride,
    capacity,
    window,
    scale,  # of the scores, times log2(e)
    counters,  # one for each lot and UNIT key-value heads
    into,  # `Operand` of the product that follows
    tokens,  # new ones of a sequence
    TOKENS: tl.constexpr,  # of a lot: TOKENS of them, the last lot what is left
    LOTS: tl.constexpr,  # whether a sequence may be several
    GROUP: tl.constexpr,  # heads that share a key-value head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    DOT: tl.constexpr,  # the type of what is multiplied
    UNIT: tl.constexpr,  # key-value heads whose columns are whole tiles of the operand
    ROWS: tl.constexpr,  # a power of two, at least TOKENS
    TILES: tl.constexpr,  # combined at a time
    SPLITS: tl.constexpr,  # likewise
    PDL: tl.constexpr,  # it may begin before the launch before it ends
):
    """Grid (splits, kv_heads, lots of all sequences)."""
    if PDL:
        pdl_wait()
    split, kv_head, lot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, kv_heads = tl.num_programs(0), tl.num_programs(1)
    if LOTS:
        lots = tl.cdiv(tokens, TOKENS)
        sequence, begun = lot // lots, lot % lots * TOKENS
        here, row = tl.minimum(TOKENS, tokens - begun), sequence * tokens + begun
        length = tl.load(lengths + sequence) - tokens + begun + here  # keys that the last token here may see
    else:
        sequence, here, row = lot, TOKENS, lot * TOKENS
        length = tl.load(lengths + sequence)
    column = tl.arange(0, BLOCK_Q)
    token, lane = column // GROUP, tl.arange(0, BLOCK_D)
    position = length - here + token
    head = (row + token) * (kv_heads * GROUP) + kv_head * GROUP + column % GROUP
    q_mask = (column[:, None] < here * GROUP) & (lane[None, :] < HEAD_DIM)
    q = tl.load(query + head[:, None] * HEAD_DIM + lane[None, :], mask=q_mask, other=0.0).to(DOT)
    INT4: tl.constexpr = keys.dtype.element_ty == tl.uint8
    FACTOR: tl.constexpr = HEAD_DIM**-0.5  # of a rotation
    if INT4:
        turned = hadamard_rows(q.to(tl.float32), BLOCK_Q, HEAD_DIM) * FACTOR
        q, q_upper = lower_and_upper(turned.to(DOT), BLOCK_Q, HEAD_DIM)
    base = sequence.to(tl.int64) * sequence_stride + kv_head.to(tl.int64) * head_stride
    scale_base = (sequence * kv_heads + kv_head).to(tl.int64) * capacity
    first = tl.maximum(length - here - window + 1, 0) // BLOCK_K if WINDOW else 0
    blocks = tl.cdiv(length, BLOCK_K)
    each = tl.cdiv(blocks - first, splits)
    start = first + split * each
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_D // 2 if INT4 else BLOCK_D, BLOCK_Q), tl.float32)
    out_upper = out  # of int4 vectors
    for block in tl.range(start, tl.minimum(start + each, blocks)):
        key = block * BLOCK_K + tl.arange(0, BLOCK_K)
        if INT4:
            ROW: tl.constexpr = HEAD_DIM // 2 + HEAD_DIM // 16
            place = base + block * tl.full((), BLOCK_K * ROW, tl.int64)
            k, k_upper = load_int4(keys, key_scales, place, key < length, BLOCK_K, HEAD_DIM, DOT)
            v, v_upper = load_int4(values, value_scales, place, key < length, BLOCK_K, HEAD_DIM, DOT)
            score = tl.dot(k_upper, q_upper.trans(), tl.dot(k, q.trans())) * scale
        else:
            place = base + block * tl.full((), BLOCK_K * HEAD_DIM, tl.int64)
            cell = tl.arange(0, BLOCK_K)[:, None] * HEAD_DIM + lane[None, :]
            present = (key[:, None] < length) & (lane[None, :] < HEAD_DIM)
            k = tl.load(keys + place + cell, mask=present, other=0)
            v = tl.load(values + place + cell, mask=present, other=0)
            score = tl.dot(k.to(DOT), q.trans()) * scale
            if key_scales is not None:
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
        if key_scales is not None and not INT4:
            weight *= tl.load(value_scales + scale_base + key, mask=key < length, other=0.0)[:, None]
        out = out * shrink[None, :] + tl.dot(v.to(DOT).trans(), weight.to(DOT))
        if INT4:
            out_upper = out_upper * shrink[None, :] + tl.dot(v_upper.trans(), weight.to(DOT))
        top = new_top
    if INT4:
        rotated = whole_rows(out.trans(), out_upper.trans(), BLOCK_Q, HEAD_DIM)
        out = (hadamard_rows(rotated, BLOCK_Q, HEAD_DIM) * FACTOR).trans()
    part = ((lot * kv_heads + kv_head) * splits + split) * BLOCK_Q + column
    tl.store(outputs + part[None, :] * HEAD_DIM + lane[:, None], out, mask=lane[:, None] < HEAD_DIM)
    tl.store(stats + part * 2, top)
    tl.store(stats + part * 2 + 1, total)

    unit, units = kv_head // UNIT, tl.cdiv(kv_heads, UNIT)
    sharing = tl.minimum(UNIT, kv_heads - unit * UNIT)
    if last_to_arrive(counters + lot * units + unit, sharing * splits):
        SPAN: tl.constexpr = UNIT * GROUP * HEAD_DIM // into.TILE_K
        parts = lot.to(tl.int64) * kv_heads * splits * BLOCK_Q
        end = tl.minimum((unit + 1) * SPAN, into.tiles)
        for tile in tl.range(unit * SPAN, end, TILES):
            _combine(
                outputs + parts * HEAD_DIM, stats + parts * 2, row, here, tile, end, kv_heads * GROUP, splits,
                into, GROUP, HEAD_DIM, BLOCK_Q, ROWS, TILES, SPLITS, query.dtype.element_ty,
            )  # fmt: skip


def splits(chip: Chip, programs: int, capacity: int) -> int:
    """Into how many parts the keys are split: two programs for each multiprocessor, of four turns or more.

    Depends on the capacity alone, so that it does not change while a sequence grows.
    """
    wanted = max(1, 2 * chip.processors // programs)
    return min(_MOST_SPLITS, wanted, max(1, capacity // (4 * BLOCK_K)))


def combination(tokens: int, columns: int, tile_k: int, parts: int, warps: int) -> dict[str, int]:
    """How the last split combines all: constants of `attend_kernel`. columns: of the heads that share a key-value head.

    A thread has 4 columns, where there are as many, of up to 8 splits at a time; of 4 where more would cost the loop of
    the kernel its second block on a multiprocessor.
    """
    rows, unit = 1 << (tokens - 1).bit_length(), tile_k // math.gcd(tile_k, columns)
    tiles = min(1 << (unit * columns // tile_k - 1).bit_length(), max(1, 128 * warps // (rows * tile_k)))
    return {"UNIT": unit, "ROWS": rows, "TILES": tiles, "SPLITS": min(32 // warps, 1 << (parts - 1).bit_length())}


def attend_warps(block_q: int) -> int:
    """Of one program: more than 16 queries in 4 warps would not stay in registers."""
    return 4 if block_q <= 16 else 8


def attend_stages(chip: Chip, head_dim: int, queries: int, element: int) -> int:
    """Blocks of keys and values that are under way at a time: 3, or as many as the chip's shared memory holds; or 0.

    queries: `BLOCK_Q` of `attend_kernel`; element: bytes of a key's number. Counts what the pipeline of Triton 3.6 and
    3.7 takes, or more: chips with asynchronous products keep keys and values apart, and what is multiplied besides.
    """
    lanes, apart = 1 << (head_dim - 1).bit_length(), chip.capability[0] in (9, 10, 11)
    block = BLOCK_K * lanes * element * (2 if apart else 1)
    besides = 2 * queries * lanes + (2 * BLOCK_K * queries if apart else 0) + 2048
    if element == 1:  # widened before they are multiplied, with a scale for each
        besides += 2 * BLOCK_K * lanes
        block += 8 * BLOCK_K
    return max(0, min(3, (chip.shared - besides) // block))


def tokens_at_once(tokens: int, group: int) -> int:
    """New tokens that a program takes of a sequence's, with the `group` heads that share a key-value head; or 0.

    No more than it has columns for, and so that all lots of a sequence are about as large.
    """
    most = MOST_QUERIES // group
    return most and -(-tokens // -(-tokens // most))


def queries_of(tokens: int, group: int) -> int:
    """Columns that hold the queries of `tokens` new tokens and the `group` heads that share a key-value head."""
    return max(8, 1 << (tokens * group - 1).bit_length())


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    window: int | None,
    product: TritonMatmul,
    counters: Tensor,
) -> Activation:
    """query [sequences, tokens, heads, head_dim], the last positions of the cache, attends to what it may see.

    Returns the operand of `product`. At most 64 heads may share a key-value head. counters: int32 zeros, at least
    sequences * tokens * kv_heads; they are zero again afterwards.
    """
    check_contiguous(query, lengths)
    sequences, tokens, heads, head_dim = query.shape
    kv_heads, capacity = cache.keys.shape[1:3]
    group = heads // kv_heads
    each = tokens_at_once(tokens, group)
    block_q = queries_of(each or tokens, group)
    stages = attend_stages(product.chip, head_dim, block_q, cache.keys.element_size())
    if not each or not stages:
        raise ValueError(f"{group} heads of {head_dim} to a key: more than 64, or no room")
    lots = sequences * -(-tokens // each)
    parts = splits(product.chip, lots * kv_heads, capacity)
    dot = tl.float16
    if query.dtype is torch.bfloat16:
        dot = tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter multiplies the bits of bf16 as integers
    shape = (lots, kv_heads, parts, block_q)
    outputs = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    into = product.activation(sequences * tokens)
    attend_kernel[(parts, kv_heads, lots)](
        query, cache.keys, cache.values, *cache.scales(), lengths, outputs, stats,
        *cache.keys.stride()[:2], capacity, window or 0, head_dim**-0.5 * math.log2(math.e), counters, into.operand(),
        tokens, TOKENS=each, LOTS=each < tokens, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_Q=block_q, BLOCK_K=BLOCK_K, WINDOW=window is not None, DOT=dot,
        **combination(each, group * head_dim, into.tile_k, parts, attend_warps(block_q)),
        PDL=product.chip.pdl, launch_pdl=product.chip.pdl,
        num_warps=attend_warps(block_q), num_stages=stages,
    )  # fmt: skip
    return into
