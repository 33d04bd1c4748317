"""Decode attention: a few new tokens per sequence attend to the paged KV cache, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.cache_codes import (
    INT8_BIAS,
    biased_int8,
    biased_int8_words,
    convert_int8_words,
    converted,
)
from mycli.runtime.kernels.triton.int4_cache import (
    hadamard_rows,
    load_int4,
    lower_and_upper,
    whole_rows,
)
from mycli.runtime.kernels.triton.pdl import pdl_wait, prefetch_run
from mycli.runtime.kernels.triton.product.activation import (
    columns_of,
    scaled_rows,
    some_tiles,
    store_activation,
)
from mycli.runtime.kernels.triton.split_k import last_to_arrive

# The keys of a sequence are split among programs with a running maximum and sum each; the last program to finish
# combines them in a fixed order and writes the operand of the next product. Keys are the rows of the MMA; its columns
# are the queries that share a key-value head (grouped heads times new tokens). Lengths and block tables are read on the
# device, so a captured CUDA graph stays valid while sequences grow, come and go. A turn of the loop reads keys of one
# cache block only, so its size is a multiple of `BLOCK_K`, or the block holds a whole sequence. int8 scales are applied
# to scores and probabilities; int4 vectors are multiplied in their rotated basis.

_LEAST_SCALE = tl.constexpr(1e-30)  # of an int8 value: its inverse, summed over keys, stays finite


@triton.jit(noinline=True)  # inlined, its addresses would take registers from the key loop
def _combine(
    outputs,  # of one query block: fp32 [kv_heads, splits, BLOCK_Q, HEAD_DIM], and stats [.., 2]
    stats,
    row,  # row of the first token
    tokens,
    tile,  # first of TILES tiles
    end,  # end of the tiles whose heads are complete
    heads,
    splits,
    active,  # splits with keys, the first ones; the others are not stored
    sinks,
    into,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least the tokens
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,  # splits read per iteration
    SEGMENT: tl.constexpr,  # columns of one head; 1 if heads begin within a step of the MMA's order
    DTYPE: tl.constexpr,
):
    """Combine the splits of some heads in order; a split without visible keys has a maximum of -inf."""
    token, tile = some_tiles(0, tile, ROWS, TILES)
    present = (token < tokens) & (tile < end)
    # What depends on the head alone is computed once for each segment of columns, which lies in one head.
    SEGMENTS: tl.constexpr = into.TILE_K // SEGMENT
    COUNT: tl.constexpr = ROWS * TILES * SEGMENTS
    column = columns_of(tile, into).reshape(COUNT, SEGMENT)
    if SEGMENT == 1:
        head = column // HEAD_DIM
    else:
        head = (tile[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]).reshape(COUNT, 1) * SEGMENT // HEAD_DIM
    inside = tl.broadcast_to(present[:, None], (ROWS * TILES, SEGMENTS)).reshape(COUNT, 1) & (head < heads)
    place = tl.broadcast_to(token[:, None], (ROWS * TILES, SEGMENTS)).reshape(COUNT, 1) * GROUP + head % GROUP
    place += head // GROUP * splits * BLOCK_Q
    source = outputs + place * HEAD_DIM + column % HEAD_DIM
    top = tl.full((COUNT, 1), float("-inf"), tl.float32)
    total = tl.zeros((COUNT, 1), tl.float32)
    out = tl.zeros((COUNT, SEGMENT), tl.float32)
    for first in tl.range(0, active, SPLITS):
        tops: tl.tuple = ()
        totals: tl.tuple = ()
        outs: tl.tuple = ()
        new_top = top
        for index in tl.static_range(SPLITS):
            at, mask = (first + index) * BLOCK_Q, inside & (first + index < active)
            split_top = tl.load(stats + (place + at) * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
            tops = tops + (split_top,)
            totals = totals + (tl.load(stats + (place + at) * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg"),)
            outs = outs + (tl.load(source + at * HEAD_DIM, mask=mask, other=0.0, cache_modifier=".cg"),)
            new_top = tl.maximum(new_top, split_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        total, out = total * shrink, out * shrink
        for index in tl.static_range(SPLITS):
            weight = tl.exp2(tops[index] - base)
            total += weight * totals[index]
            out += weight * outs[index]
        top = new_top
    if sinks is not None:  # one more score in the softmax of each head, without a value
        sink = tl.load(sinks + head, mask=head < heads, other=0.0) * 1.4426950408889634
        base = tl.where(total > 0.0, tl.maximum(top, sink), sink)
        shrink = tl.where(total > 0.0, tl.exp2(top - base), 0.0)
        total, out = total * shrink + tl.exp2(sink - base), out * shrink
    # Padding sequences have no keys: 0 instead of 0 / 0. A NaN stays one.
    result = tl.where(inside & (total != 0.0), out / total, 0.0).to(DTYPE).to(tl.float32)
    PARTS: tl.constexpr = SEGMENTS if SEGMENT > 1 else 1
    store_activation(result.reshape(ROWS * TILES, into.TILE_K), row + token, tile, present, into, PARTS)


@triton.jit(do_not_specialize=["tokens", "table_width"])
def attend_kernel(
    query,  # [sequences, tokens, heads, HEAD_DIM]
    keys,  # [blocks, kv_heads, block_size, HEAD_DIM], block_stride and head_stride apart; int8, int4 or as query
    values,
    key_scales,  # fp32 [blocks, kv_heads, block_size] for int8, bf16 [..., HEAD_DIM / 32] for int4, else None
    value_scales,
    lengths,  # int32 [sequences]: number of keys, those of the new tokens included; 0 for a padding sequence
    counts,  # int32 [sequences]: new tokens of each sequence, if the last of its `tokens` are padding; else None
    block_table,  # int32 [sequences, table_width]: the cache blocks of each sequence in order
    outputs,  # fp32 [query_blocks, kv_heads, splits, BLOCK_Q, HEAD_DIM]
    stats,  # fp32 [query_blocks, kv_heads, splits, BLOCK_Q, 2]: maximum and sum of exponentials, base 2
    block_stride,
    head_stride,
    block_size,
    table_width,
    window,  # positions that a token attends to, or where CHUNKED the size of a chunk
    scale,  # scale of the scores times log2(e), or where CAPPED divided by the softcap
    softcap,  # where CAPPED the softcap times log2(e)
    sinks,  # fp32 [heads]: a score per head that has no value, or None
    counters,  # one per query block and UNIT key-value heads
    into,  # `Operand` of the next product
    tokens,  # new tokens per sequence
    TOKENS: tl.constexpr,  # new tokens per query block; the last one has the rest
    SPLIT_QUERIES: tl.constexpr,  # a sequence may have several query blocks
    GROUP: tl.constexpr,  # heads that share a key-value head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TURNS: tl.constexpr,  # turns of the key loop in a cache block; 0 if each sequence is one block
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,  # a token attends to positions from the last multiple of `window` on
    CAPPED: tl.constexpr,  # a score s becomes softcap * tanh(s / softcap)
    DOT: tl.constexpr,  # dtype of the MMA operands
    ASM: tl.constexpr,
    PURE: tl.constexpr,  # conversions may be moved (`cache_codes`)
    UNIT: tl.constexpr,  # smallest number of key-value heads whose columns are whole tiles of the operand
    ROWS: tl.constexpr,  # a power of two, at least TOKENS
    TILES: tl.constexpr,  # tiles combined at a time
    SPLITS: tl.constexpr,  # splits combined at a time
    SEGMENT: tl.constexpr,  # as in `_combine`
    LEAST_TURNS: tl.constexpr,  # of a split
    UPRIGHT: tl.constexpr,  # values of 16 bits are copied to shared memory ahead (`copies_values`)
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Grid (splits, kv_heads, query blocks of all sequences)."""
    # Lengths and the block table are not written by the launch before, so they are loaded while it runs.
    split, kv_head, query_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, kv_heads = tl.num_programs(0), tl.num_programs(1)
    if SPLIT_QUERIES:
        query_blocks = tl.cdiv(tokens, TOKENS)
        sequence, done = query_block // query_blocks, query_block % query_blocks * TOKENS
        here, row = tl.minimum(TOKENS, tokens - done), sequence * tokens + done
        length = tl.load(lengths + sequence) - tokens + done + here  # keys visible to the last token here
    else:
        sequence, here, row = query_block, TOKENS, query_block * TOKENS
        length = tl.load(lengths + sequence)
    first_position = length - here
    if counts is not None:  # keys of padding are not stored
        length = tl.minimum(length, tl.load(lengths + sequence) - tokens + tl.load(counts + sequence))
    column = tl.arange(0, BLOCK_Q)
    token, lane = column // GROUP, tl.arange(0, BLOCK_D)
    position = first_position + token
    head = (row + token) * (kv_heads * GROUP) + kv_head * GROUP + column % GROUP
    INT4: tl.constexpr = keys.dtype.element_ty == tl.uint8
    ROW: tl.constexpr = HEAD_DIM // 2 if INT4 else HEAD_DIM  # stored numbers of a key
    table, head_base = block_table + sequence * table_width, kv_head.to(tl.int64) * head_stride
    first = tl.maximum(first_position - window + 1, 0) // BLOCK_K if WINDOW else 0
    if CHUNKED:
        first = tl.maximum(first_position, 0) // window * window // BLOCK_K
    blocks = tl.cdiv(length, BLOCK_K)
    share = tl.maximum(tl.cdiv(blocks - first, splits), LEAST_TURNS)
    active = tl.maximum(tl.cdiv(blocks - first, share), 1)
    start = first + split * share
    # The block of the next turn is loaded a turn early: its keys wait for it.
    next_page = tl.load(table + (tl.minimum(start // TURNS, table_width - 1) if TURNS else 0))
    if PDL:
        inside = start % TURNS if TURNS else start
        size = (tl.minimum(start + share, blocks) - start) * (BLOCK_K * ROW)
        base = next_page.to(tl.int64) * block_stride + head_base + inside * tl.full((), BLOCK_K * ROW, tl.int64)
        prefetch_run(keys + base, size * (keys.dtype.element_ty.primitive_bitwidth // 8))
        prefetch_run(values + base, size * (keys.dtype.element_ty.primitive_bitwidth // 8))
        pdl_wait()
    q_mask = (column[:, None] < here * GROUP) & (lane[None, :] < HEAD_DIM)
    q = tl.load(query + head[:, None] * HEAD_DIM + lane[None, :], mask=q_mask, other=0.0).to(DOT)
    FACTOR: tl.constexpr = HEAD_DIM**-0.5  # makes the Hadamard transform orthonormal
    if INT4:
        rotated_q = hadamard_rows(q.to(tl.float32), BLOCK_Q, HEAD_DIM) * FACTOR
        q, q_upper = lower_and_upper(rotated_q.to(DOT), BLOCK_Q, HEAD_DIM)
    INT8: tl.constexpr = key_scales is not None and not INT4
    # With PTX, int8 codes keep the bias of their conversion, which is subtracted from scores, and from sums at the end.
    BIASED: tl.constexpr = INT8 and ASM
    if BIASED:
        q, up = scaled_rows(q.to(tl.float32))
        score_start = tl.broadcast_to((tl.sum(q.to(tl.float32), axis=1) * -INT8_BIAS)[None, :], (BLOCK_K, BLOCK_Q))
        scales = up * scale
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    # Of 8-bit values a thread loads 16 bytes and stores 32 to shared memory, once they are converted: stored as two
    # halves of 16 columns, 8 and 8, they meet in no bank. As words they are copied ahead, and packed by no instruction.
    HALVES: tl.constexpr = INT4 or (INT8 and BLOCK_D >= 64 and HEAD_DIM % 4 == 0)
    out = tl.zeros((BLOCK_D // 2 if HALVES else BLOCK_D, BLOCK_Q), tl.float32)
    out_upper = out
    # Scales of int8 values are part of the exponent, so that weights are at most 1 and fp16 holds them. Sums of
    # exponentials without them, and of weights, are kept by row of a block.
    sums = tl.zeros((BLOCK_K, BLOCK_Q), tl.float32)
    weights = sums
    for block in tl.range(start, tl.minimum(start + share, blocks)):
        key, page, inside = block * BLOCK_K + tl.arange(0, BLOCK_K), next_page, block
        if TURNS:
            next_page = tl.load(table + tl.minimum((block + 1) // TURNS, table_width - 1))
            inside = block % TURNS
        base = page.to(tl.int64) * block_stride + head_base
        vector = (page * kv_heads + kv_head).to(tl.int64) * block_size + inside * BLOCK_K
        scale_base = vector + tl.arange(0, BLOCK_K)
        if INT4:
            place = base + inside * tl.full((), BLOCK_K * ROW, tl.int64)
            k, k_upper = load_int4(keys, key_scales, place, vector, key < length, BLOCK_K, HEAD_DIM, DOT, ASM, False)
            v, v_upper = load_int4(
                values, value_scales, place, vector, key < length, BLOCK_K, HEAD_DIM, DOT, ASM, True, PURE
            )
            score = tl.dot(k_upper, q_upper.trans(), tl.dot(k, q.trans())) * scale
        else:
            place = base + inside * tl.full((), BLOCK_K * HEAD_DIM, tl.int64)
            cell = tl.arange(0, BLOCK_K)[:, None] * HEAD_DIM + lane[None, :]
            present = (key[:, None] < length) & (lane[None, :] < HEAD_DIM)
            k = tl.load(keys + place + cell, mask=present, other=0)
            if HALVES:
                word = tl.arange(0, BLOCK_D // 4)
                cell = tl.arange(0, BLOCK_K)[:, None] * (HEAD_DIM // 4) + word[None, :]
                present = (key[:, None] < length) & (word[None, :] < HEAD_DIM // 4)
                words = tl.load(values.to(tl.pointer_type(tl.int32)) + (place // 4 + cell), mask=present, other=0)
                if BIASED:
                    v = biased_int8_words(words, BLOCK_K, BLOCK_D // 4, PURE)
                else:
                    v = convert_int8_words(words, BLOCK_K, BLOCK_D // 4, DOT, ASM, PURE)
                v, v_upper = lower_and_upper(v, BLOCK_K, BLOCK_D)
            elif UPRIGHT:  # in the order of the MMA's operand, so that they are copied to shared memory ahead
                upright = lane[:, None] + tl.arange(0, BLOCK_K)[None, :] * HEAD_DIM
                v = tl.load(
                    values + place + upright, mask=(lane[:, None] < HEAD_DIM) & (key[None, :] < length), other=0
                )
            else:
                v = tl.load(values + place + cell, mask=present, other=0)
                if BIASED:
                    v = biased_int8(v)
            if BIASED:
                score = tl.dot(biased_int8(k), q.trans(), score_start) * scales[None, :]
            else:
                score = tl.dot(k.to(DOT), q.trans()) * scale
            if INT8:
                score *= tl.load(key_scales + scale_base, mask=key < length, other=0.0)[:, None]
        if HALVES:
            v, v_upper = converted(v, ASM, PURE), converted(v_upper, ASM, PURE)
        if CAPPED:  # tanh(s), exact at both ends
            score = softcap - 2.0 * softcap / (tl.exp2(score * 2.8853900817779268) + 1.0)
        if INT8:
            value_scale = tl.load(value_scales + scale_base, mask=key < length, other=1.0)
            exponent = tl.log2(value_scale + _LEAST_SCALE)
            score += exponent[:, None]
        seen = key[:, None] <= position[None, :]
        if WINDOW:
            seen = seen & (position[None, :] - key[:, None] < window)
        if CHUNKED:
            seen = seen & (key[:, None] >= (position // window * window)[None, :])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        base_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base_top[None, :])
        shrink = tl.exp2(top - base_top)
        if INT8:
            sums = sums * shrink[None, :] + weight * tl.exp2(-exponent)[:, None]
        else:
            total = total * shrink + tl.sum(weight, axis=0)
        if BIASED:
            weights = weights * shrink[None, :] + weight.to(DOT).to(tl.float32)
        out = out * shrink[None, :] + tl.dot(v.to(DOT) if UPRIGHT else v.to(DOT).trans(), weight.to(DOT))
        if HALVES:
            out_upper = out_upper * shrink[None, :] + tl.dot(v_upper.to(DOT).trans(), weight.to(DOT))
        top = new_top
    if INT8:
        total = tl.sum(sums, axis=0)
    if BIASED:
        bias = tl.sum(weights, axis=0) * INT8_BIAS
        out, out_upper = out - bias[None, :], out_upper - bias[None, :]
    if HALVES:
        whole = whole_rows(out.trans(), out_upper.trans(), BLOCK_Q, BLOCK_D)
        if INT4:
            whole = hadamard_rows(whole, BLOCK_Q, HEAD_DIM) * FACTOR
        out = whole.trans()
    if split < active:
        part = ((query_block * kv_heads + kv_head) * splits + split) * BLOCK_Q + column
        tl.store(outputs + part[None, :] * HEAD_DIM + lane[:, None], out, mask=lane[:, None] < HEAD_DIM)
        tl.store(stats + part * 2, top)
        tl.store(stats + part * 2 + 1, total)

        unit, units = kv_head // UNIT, tl.cdiv(kv_heads, UNIT)
        sharing = tl.minimum(UNIT, kv_heads - unit * UNIT)
        if last_to_arrive(counters + query_block * units + unit, sharing * active):
            SPAN: tl.constexpr = UNIT * GROUP * HEAD_DIM // into.TILE_K
            parts = query_block.to(tl.int64) * kv_heads * splits * BLOCK_Q
            end = tl.minimum((unit + 1) * SPAN, into.tiles)
            for tile in tl.range(unit * SPAN, end, TILES):
                _combine(
                    outputs + parts * HEAD_DIM, stats + parts * 2, row, here, tile, end, kv_heads * GROUP, splits,
                    active, sinks, into, GROUP, HEAD_DIM, BLOCK_Q, ROWS, TILES, SPLITS, SEGMENT,
                    query.dtype.element_ty,
                )  # fmt: skip
