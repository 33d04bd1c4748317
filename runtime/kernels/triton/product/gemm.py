"""y = x W^T for packed weights and few rows, as Triton device code; `product.matmul` launches and checks arguments."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.pdl import pdl_wait, prefetch_weights
from mycli.runtime.kernels.triton.product.grouped import expert_tile
from mycli.runtime.kernels.triton.product.scales import load_scales, row_terms, scale_word, tile_blocks, to_scales
from mycli.runtime.kernels.triton.product.tables import table4, table8
from mycli.runtime.kernels.triton.product.unpack import unpack2, unpack3, unpack4, unpack8
from mycli.runtime.kernels.triton.split_k import run_epilogue

# The weight tile [BLOCK_N, TILE_K] is the 16-row operand of the MMA, unpacked in registers from the order of
# `product.weight_layout`, and the activations are its 8 columns, so 1 to 8 rows cost the same. What unpacking leaves
# in (bias, power of two) is removed once per group:
#
#     y += s / 2^e * (acc * scale_x - (1024 + 2^e * zero) * sum_x) + offset * sum_x
#
# with acc the fp32 sum of (1024 + 2^e * u) * x, and zero the code of value 0, 2^(bits-1) of integers; tables of floats
# have no bias (`product.tables`). Groups of 16 are unpacked two at a time, with an MMA each. Sums over K are fp32 in a
# fixed order: parts of K are stored apart and added in turn, by a kernel or by the program that runs the `Epilogue`
# (`triton.split_k`).


class RmsScale(NamedTuple):
    """The divisor of rows that come from a norm: the root of their mean square (RMSNorm, arXiv 1910.07467)."""

    squares: Any  # fp32 [pieces, padded rows]: sum of squares of each piece of a row
    pieces: Any
    size: Any  # columns of a row
    eps: Any
    PIECES: Any  # a power of two, at least `pieces`


@triton.jit
def _load_weights(
    codes,
    chunks,  # int64: index of each chunk of the tile
    k_chunks,
    tile,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_K: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNK_K: tl.constexpr,
    WARPS: tl.constexpr,
    CODES: tl.constexpr,
    ASM: tl.constexpr,
    WGMMA: tl.constexpr = False,  # columns in the order of wgmma: (pair of pairs, k half, lane % 4, even or odd)
):
    """Load a tile of 1024 + 2^e * u, fp16 [BLOCK_N, TILE_K], columns in MMA order.

    The permutations only rename registers: read them as (chunk, lane / 4 = 8, lane % 4 = 4, 8 fields, fields apart).
    """
    # With the order of the older MMA, the 16 bytes of a thread would be loaded by wgmma's layout as 4 words whose banks
    # conflict four times.
    NARROW: tl.constexpr = CHUNK_K == 32 and BITS != 8
    WIDE_K: tl.constexpr = TILE_K // CHUNK_K
    PER_WARP: tl.constexpr = BLOCK_N // (16 * REPEATS) // WARPS
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    run = tl.arange(0, WIDE_K)[None, :, None] * (WORDS * 256) + tl.arange(0, 256)[None, None, :]
    source = codes + tile * (WIDE_K * WORDS * 256) + chunks[:, None, None] * (k_chunks * WORDS * 256) + run
    a = tl.load(source)
    if BITS == 8:
        w = unpack8(a, ASM) if CODES == "int" else table8(a, CODES, ASM)
        w = w.reshape(PER_WARP, WARPS, WIDE_K, 8, 4, 2, 2, 2, 2)
        w = w.permute(0, 1, 8, 3, 2, 6, 5, 4, 7) if WGMMA else w.permute(0, 1, 8, 3, 2, 5, 4, 6, 7)
    elif BITS == 4:
        w = unpack4(a, ASM) if CODES == "int" else table4(a, CODES, ASM)
        w = w.reshape(PER_WARP, WARPS, WIDE_K, 8, 4, 2, 2, 2, 2, 2)
        if WGMMA:
            w = w.permute(0, 5, 1, 8, 3, 2, 6, 9, 4, 7) if NARROW else w.permute(0, 1, 8, 3, 2, 5, 6, 9, 4, 7)
        else:
            w = w.permute(0, 5, 1, 8, 3, 2, 9, 4, 6, 7) if NARROW else w.permute(0, 1, 8, 3, 2, 5, 9, 4, 6, 7)
    elif BITS == 2:
        w = unpack2(a, ASM).reshape(PER_WARP, WARPS, WIDE_K, 8, 4, 2, 2, 2, 2, 2, 2)
        if WGMMA:
            w = w.permute(0, 5, 9, 1, 8, 3, 2, 6, 10, 4, 7) if NARROW else w.permute(0, 9, 1, 8, 3, 2, 5, 6, 10, 4, 7)
        else:
            w = w.permute(0, 5, 9, 1, 8, 3, 2, 10, 4, 6, 7) if NARROW else w.permute(0, 9, 1, 8, 3, 2, 5, 10, 4, 6, 7)
    else:
        b, c = tl.load(source + 256), tl.load(source + 512)
        w = unpack3(a, b, c, ASM).reshape(PER_WARP, WARPS, WIDE_K, 8, 4, 2, 2, 2, 2, 2, 2, 2)
        if NARROW and WGMMA:
            w = w.permute(0, 5, 10, 9, 1, 8, 3, 2, 6, 11, 4, 7)
        elif NARROW:
            w = w.permute(0, 5, 10, 9, 1, 8, 3, 2, 11, 4, 6, 7)
        elif WGMMA:
            w = w.permute(0, 10, 9, 1, 8, 3, 2, 5, 6, 11, 4, 7)
        else:
            w = w.permute(0, 10, 9, 1, 8, 3, 2, 5, 11, 4, 6, 7)
    return w.reshape(BLOCK_N, TILE_K)


@triton.jit
def _two_groups(w, BLOCK_N: tl.constexpr, PERMUTED: tl.constexpr):
    """Split a step of 32 columns into its two groups, fp16 [BLOCK_N, 16] each, columns in MMA order.

    A thread has columns 4t .. 4t + 3 of each. wgmma orders them (k half, t, pair), the older MMA as stored.
    """
    w = w.reshape(BLOCK_N, 2, 4, 2, 2)  # (k half, t, group, pair)
    w = w.permute(0, 1, 2, 4, 3) if PERMUTED else w.permute(0, 2, 1, 4, 3)
    return tl.split(w.reshape(BLOCK_N, 16, 2))


@triton.jit
def _row_sum(sums, tile, end, x_columns, rows_padded, BLOCK_M: tl.constexpr, ROUTED: tl.constexpr):
    start = sums + tl.minimum(tile, end - 1) * (2 * rows_padded)
    if ROUTED or BLOCK_M <= 8:
        pair = tl.load(start + x_columns[:, None] * 2 + tl.arange(0, 2)[None, :])
    else:  # two rows of a thread in one load of 16 bytes: by rows, a load would use half of its sectors
        run = tl.multiple_of(start, 16) + tl.program_id(2) * (2 * BLOCK_M) + tl.arange(0, 2 * BLOCK_M)
        pair = tl.load(run).reshape(BLOCK_M, 2)
    return pair


@triton.jit
def load_squares(rms, x_columns, rows_padded, present):
    """Return the sums of squares of the pieces of rows, fp32 [PIECES, rows]."""
    piece = tl.arange(0, rms.PIECES)[:, None]
    known = (piece < rms.pieces) & present[None, :]
    return tl.load(rms.squares + piece * rows_padded + x_columns[None, :], mask=known, other=0.0)


@triton.jit(do_not_specialize=["rows", "rows_padded", "tiles_per_part"])
def multiply_kernel(
    codes,  # int16, in the order of `product.weight_layout`
    scales,  # int32 pairs of 16-bit scales, or fp32
    offsets,  # fp32 in the order of fp32 scales, or None
    x,  # fp16 [rows, k_padded], scaled
    sums,  # fp32 [k_padded / TILE_K, rows_padded, 2]: the power of two of x, and the sum before scaling
    y,  # [parts, rows, n]
    rows,
    n,
    n_padded,
    k_padded,
    rows_padded,
    tiles_per_part,
    rms,  # `RmsScale` or None
    epilogue,  # `Epilogue` where EPILOGUE, else None
    routed,  # `Routed` where ROUTED, else None: rows of y are pairs, `codes` and `scales` those of the first expert
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_K: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
    REPEATS: tl.constexpr,  # MMA tiles of 16 rows in a chunk
    CHUNK_K: tl.constexpr,
    SCALE: tl.constexpr,  # dtype of the scales: bf16, fp16, fp32
    CHANNEL: tl.constexpr,  # one scale per row
    CODES: tl.constexpr,  # meaning of the codes: `int`, or a table
    UNIT: tl.constexpr,  # value / unpacked number of a table
    ZERO: tl.constexpr,  # code or byte at which a value is 0, None for floats
    PERMUTED: tl.constexpr,  # columns of x are in MMA order
    ASM: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
    NEXT_FIRST: tl.constexpr,  # the next launch may begin before this one's wait
    EPILOGUE: tl.constexpr,  # Triton 3.6 cannot compare a tuple that contains None with None
    ROUTED: tl.constexpr,
):
    """Grid (blocks of n, parts of K, blocks of rows); UNROLL divides tiles_per_part and the number of tiles."""
    CHUNK_N: tl.constexpr = 16 * REPEATS
    block, part = tl.program_id(0), tl.program_id(1)
    # Chunks past the end read the last one; their rows are never stored.
    chunks = tl.minimum(block * (BLOCK_N // CHUNK_N) + tl.arange(0, BLOCK_N // CHUNK_N), n_padded // CHUNK_N - 1)
    chunks = chunks.to(tl.int64)
    blocks = tile_blocks(block, BLOCK_N, REPEATS, WARPS)
    stored_blocks = tl.minimum(blocks, n_padded // 16 - 1)
    k_chunks = k_padded // CHUNK_K
    if ROUTED:
        if PDL:  # the routing comes from the previous launch, so no weight can be prefetched
            pdl_wait()
        which, columns, x_columns, last = expert_tile(routed, BLOCK_M)
        codes += tl.load(routed.codes + which) * 8
        scales += tl.load(routed.scales + which) * 4
        if offsets is not None:
            offsets += tl.load(routed.offsets + which) * 4
    else:
        columns, last = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), rows
        x_columns = columns
    x_rows = x + x_columns[:, None] * k_padded + tl.arange(0, TILE_K)[None, :]
    x_places = x_columns[:, None] * k_padded + tl.arange(0, 32)[None, :]
    x_steps = x + x_places
    if TILE_K >= 32:  # 32-bit places and one address: 64-bit addresses of each would spill registers with Triton 3.6
        STEPS: tl.constexpr = TILE_K // 32
        if BLOCK_M <= 8:
            x_tile = x_places[None, :, :] + tl.arange(0, STEPS)[:, None, None] * 32
            x_row = columns[None, :, None]
        else:  # Of a dimension of steps, a thread would load several, and Triton would store those side by side.
            starts = x_columns[None, :] * k_padded + tl.arange(0, STEPS)[:, None] * 32
            starts = tl.multiple_of(starts.reshape(STEPS * BLOCK_M), 32)  # lost in `reshape`
            x_tile = starts[:, None] + tl.arange(0, 32)[None, :]
            x_row = tl.broadcast_to(columns[None, :], (STEPS, BLOCK_M)).reshape(STEPS * BLOCK_M)[:, None]
    factor, bias = row_terms(BITS, BLOCK_N, REPEATS, WARPS, CODES, UNIT, ZERO)
    start = part * tiles_per_part
    end = tl.minimum(start + tiles_per_part, k_padded // TILE_K)
    stop = end
    if ROUTED:
        stop = tl.where(last > 0, end, start)
    elif PDL:
        RUNS: tl.constexpr = BLOCK_N // CHUNK_N
        TILE_BYTES: tl.constexpr = CHUNK_N * TILE_K * BITS // 8
        run_bytes = (k_padded // TILE_K).to(tl.int64) * TILE_BYTES
        begin = codes + start * (TILE_BYTES // 2)
        part_bytes = (end - start) * TILE_BYTES
        prefetch_weights(begin, block * RUNS, n_padded // CHUNK_N - 1, run_bytes, part_bytes, RUNS, WARPS)
        pdl_wait(NEXT_FIRST)
    # Scales, and of few rows the sums, are loaded one iteration ahead, each once the one before it was used: a register
    # that waits for a load cannot be moved. Of more rows, registers for the sums are too scarce; wgmma needs fewer.
    AHEAD: tl.constexpr = BLOCK_M <= 8 or (PERMUTED and BLOCK_M <= 16 and UNROLL <= 2)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if CHANNEL and offsets is not None:
        x_total = tl.zeros((BLOCK_M,), tl.float32)
    if rms is not None and AHEAD:
        squares = load_squares(rms, x_columns, rows_padded, columns < last)
    words: tl.tuple = ()
    pairs: tl.tuple = ()
    if not CHANNEL:
        for turn in tl.static_range(UNROLL):
            words = words + (scale_word(scales, start + turn, end, n_padded, stored_blocks, BLOCK_N, SCALE),)
    if AHEAD:
        for turn in tl.static_range(UNROLL):
            pairs = pairs + (_row_sum(sums, start + turn, end, x_columns, rows_padded, BLOCK_M, ROUTED),)
    for tile in tl.range(start, stop, UNROLL):
        next_words: tl.tuple = ()
        next_pairs: tl.tuple = ()
        for turn in tl.static_range(UNROLL):
            now = tile + turn
            pair = pairs[turn] if AHEAD else _row_sum(sums, now, end, x_columns, rows_padded, BLOCK_M, ROUTED)
            if TILE_K >= 32:
                w = _load_weights(
                    codes, chunks, k_chunks, now, BITS, BLOCK_N, TILE_K, REPEATS, CHUNK_K, WARPS, CODES, ASM, PERMUTED
                )
                if PERMUTED:
                    xt = tl.load(x_rows + now * TILE_K, mask=columns[:, None] < last, other=0.0)
                else:
                    # By steps of 32 columns: with whole rows, two rows of a quarter warp would have the same banks.
                    xt = tl.load(x + (x_tile + now * TILE_K), mask=x_row < last, other=0.0)
                    xt = xt.reshape(TILE_K // 32, BLOCK_M, 4, 2, 2, 2).permute(1, 0, 4, 2, 3, 5)
                    xt = xt.reshape(BLOCK_M, TILE_K)
            elif turn % 2 == 0:
                both = _load_weights(
                    codes, chunks, k_chunks, now // 2, BITS, BLOCK_N, 32, REPEATS, CHUNK_K, WARPS, CODES, ASM
                )
                w, w_next = _two_groups(both, BLOCK_N, PERMUTED)
                if PERMUTED:
                    xt = tl.load(x_rows + now * TILE_K, mask=columns[:, None] < last, other=0.0)
                    xt_next = tl.load(x_rows + (now + 1) * TILE_K, mask=columns[:, None] < last, other=0.0)
                else:
                    xt = tl.load(x_steps + now * TILE_K, mask=columns[:, None] < last, other=0.0)
                    xt, xt_next = tl.split(xt.reshape(BLOCK_M, 2, 16).permute(0, 2, 1))
            else:
                w, xt = w_next, xt_next
            acc = tl.dot(w, xt.trans())
            x_scale, x_sum = tl.split(pair)
            part_sum = acc * x_scale[None, :]
            if ZERO is not None:
                part_sum -= bias[:, None] * x_sum[None, :]
            if CHANNEL:
                total += part_sum
                if offsets is not None:
                    x_total += x_sum
            else:
                total += (to_scales(words[turn], BLOCK_N, SCALE) * factor)[:, None] * part_sum
                if offsets is not None:
                    offset = load_scales(offsets, now, n_padded, stored_blocks, BLOCK_N, "fp32")
                    total += offset[:, None] * x_sum[None, :]
                next_words = next_words + (
                    scale_word(scales, now + UNROLL, end, n_padded, stored_blocks, BLOCK_N, SCALE),
                )
            if AHEAD:
                next_pairs = next_pairs + (_row_sum(sums, now + UNROLL, end, x_columns, rows_padded, BLOCK_M, ROUTED),)
        if not CHANNEL:
            words = next_words
        if AHEAD:
            pairs = next_pairs
    if CHANNEL:
        word = load_scales(scales, 0, n_padded, stored_blocks, BLOCK_N, SCALE)
        total *= (to_scales(word, BLOCK_N, SCALE) * factor)[:, None]
        if offsets is not None:
            total += load_scales(offsets, 0, n_padded, stored_blocks, BLOCK_N, "fp32")[:, None] * x_total[None, :]
    if rms is not None:
        if not AHEAD:
            squares = load_squares(rms, x_columns, rows_padded, columns < last)
        total *= tl.rsqrt(tl.sum(squares, axis=0) / rms.size + rms.eps)[None, :]
    out = (blocks[:, None] * 16 + tl.arange(0, 16)[None, :]).reshape(BLOCK_N)
    out = tl.max_contiguous(tl.multiple_of(out, 16), 16)  # lost in `reshape`: without it each lane stores a sector
    place = (part * rows + columns[None, :]).to(tl.int64) * n + out[:, None]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=(columns[None, :] < last) & (out[:, None] < n))
    if EPILOGUE:
        run_epilogue(epilogue, y, rows, n, BLOCK_N)


@triton.jit
def _spread(
    scales,
    tile,
    n_padded,
    blocks,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    TILE_K: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNEL: tl.constexpr,
):
    """Return scales or offsets for the columns of a step: fp32 [BLOCK_N, 1], or [BLOCK_N, STEP] for two groups."""
    if TILE_K == STEP:
        words = load_scales(scales, 0 if CHANNEL else tile, n_padded, blocks, BLOCK_N, SCALE)
        return to_scales(words, BLOCK_N, SCALE)[:, None]
    else:
        first = to_scales(load_scales(scales, 2 * tile, n_padded, blocks, BLOCK_N, SCALE), BLOCK_N, SCALE)
        second = to_scales(load_scales(scales, 2 * tile + 1, n_padded, blocks, BLOCK_N, SCALE), BLOCK_N, SCALE)
        return tl.where(tl.arange(0, STEP)[None, :] < TILE_K, first[:, None], second[:, None])


@triton.jit(do_not_specialize=["first"])
def dequantize_kernel(
    codes,
    scales,
    offsets,
    y,  # [n - first, k]
    first,  # first row of y in the weight, a multiple of BLOCK_N
    n,
    k,
    n_padded,
    k_padded,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WARPS: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNK_K: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNEL: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid (blocks of n, tiles of K, or pairs of 16-column tiles): y = value(u) * s + offset, rounded once."""
    STEP: tl.constexpr = TILE_K if TILE_K >= 32 else 32
    CHUNK_N: tl.constexpr = 16 * REPEATS
    block, tile = tl.program_id(0) + first // BLOCK_N, tl.program_id(1)
    chunks = tl.minimum(block * (BLOCK_N // CHUNK_N) + tl.arange(0, BLOCK_N // CHUNK_N), n_padded // CHUNK_N - 1)
    blocks = tile_blocks(block, BLOCK_N, REPEATS, WARPS)
    w = _load_weights(
        codes, chunks.to(tl.int64), k_padded // CHUNK_K, tile, BITS, BLOCK_N, STEP, REPEATS, CHUNK_K, WARPS, CODES, ASM
    )
    w = w.reshape(BLOCK_N, STEP // 32, 2, 4, 2, 2)  # (step, k half, t, pair of pairs, pair)
    w = w.permute(0, 1, 4, 3, 2, 5) if TILE_K == 16 else w.permute(0, 1, 3, 4, 2, 5)
    factor, bias = row_terms(BITS, BLOCK_N, REPEATS, WARPS, CODES, UNIT, ZERO)
    signed = (w.reshape(BLOCK_N, STEP).to(tl.float32) - bias[:, None]) * factor[:, None]
    row = (blocks[:, None] * 16 + tl.arange(0, 16)[None, :]).reshape(BLOCK_N)
    column = tile * STEP + tl.arange(0, STEP)
    place = y + (row - first).to(tl.int64)[:, None] * k + column[None, :]
    stored_blocks = tl.minimum(blocks, n_padded // 16 - 1)
    dense = signed * _spread(scales, tile, n_padded, stored_blocks, BLOCK_N, STEP, TILE_K, SCALE, CHANNEL)
    if offsets is not None:
        dense += _spread(offsets, tile, n_padded, stored_blocks, BLOCK_N, STEP, TILE_K, "fp32", CHANNEL)
    tl.store(place, dense.to(y.dtype.element_ty), mask=(row[:, None] < n) & (column[None, :] < k))
