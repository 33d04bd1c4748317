"""y = x W^T for 16-bit weights and few rows, as Triton device code; `product.dense` launches it."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.pdl import pdl_wait, prefetch_weights
from mycli.runtime.kernels.triton.product.gemm import load_squares
from mycli.runtime.kernels.triton.product.grouped import expert_tile
from mycli.runtime.kernels.triton.split_k import run_epilogue


@triton.jit(do_not_specialize=["rows", "rows_padded", "tiles_per_part"])
def dense_kernel(
    weight,  # [n, k]; of experts the first one's
    x,  # [rows, k], in the dtype of the weight
    sums,  # fp32 [k / TILE_K, rows_padded, 2] of scaled fp16 rows, as of `gemm.multiply_kernel`, or None
    y,  # [parts, rows, n]
    rows,
    n,
    k,
    rows_padded,
    tiles_per_part,
    rms,  # `RmsScale` or None
    epilogue,  # `Epilogue` where EPILOGUE, else None
    routed,  # `Routed` where ROUTED, else None: rows of y are pairs
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_K: tl.constexpr,
    WARPS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands of the MMA
    PDL: tl.constexpr,  # programmatic dependent launch
    NEXT_FIRST: tl.constexpr,  # the next launch may begin before this one's wait
    EPILOGUE: tl.constexpr,
    ROUTED: tl.constexpr,
):
    """Grid (blocks of n, parts of K, blocks of rows); sums over K are fp32 in a fixed order."""
    block, part = tl.program_id(0), tl.program_id(1)
    out, lane = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, TILE_K)
    start = part * tiles_per_part
    end = tl.minimum(start + tiles_per_part, k // TILE_K)
    if ROUTED:
        if PDL:  # the routing comes from the previous launch, so no weight can be prefetched
            pdl_wait()
        which, row, x_row, last = expert_tile(routed, BLOCK_M)
        weight += tl.load(routed.codes + which) * 8
        end = tl.where(last > 0, end, start)
    else:
        row, last = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), rows
        x_row = row
    if PDL and not ROUTED:
        size = (end - start) * (2 * TILE_K)
        prefetch_weights(weight + start * TILE_K, block * BLOCK_N, n - 1, k.to(tl.int64) * 2, size, BLOCK_N, WARPS)
        pdl_wait(NEXT_FIRST)
    # Rows past the end read the last one and are never stored.
    w_rows = weight + tl.minimum(out, n - 1).to(tl.int64)[:, None] * k + lane[None, :]
    x_rows = x + x_row[:, None] * k + lane[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(start, end):
        w = tl.load(w_rows + tile * TILE_K).to(DOT)
        xt = tl.load(x_rows + tile * TILE_K, mask=row[:, None] < last, other=0.0).to(DOT)
        if sums is None:
            total = tl.dot(w, xt.trans(), total)
        else:
            total += tl.dot(w, xt.trans()) * tl.load(sums + (tile * rows_padded + x_row) * 2)[None, :]
    if rms is not None:
        squares = load_squares(rms, x_row, rows_padded, row < last)
        total *= tl.rsqrt(tl.sum(squares, axis=0) / rms.size + rms.eps)[None, :]
    place = (part * rows + row[None, :]).to(tl.int64) * n + out[:, None]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=(row[None, :] < last) & (out[:, None] < n))
    if EPILOGUE:
        run_epilogue(epilogue, y, rows, n, BLOCK_N)
