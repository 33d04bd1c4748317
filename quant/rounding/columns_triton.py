"""`columns.solve_block` as one Triton kernel: each program keeps a few rows of the block in registers."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.quant.rounding.grid import BLOCK

ROWS = 8  # of the weight per program of one warp: 32 values of the block in each thread


@triton.jit
def block_kernel(
    residual,  # fp32 [count, rows]
    matrix,  # fp32 [count, count], contiguous
    scales,  # fp32 [count, rows]
    old,  # uint8 [count, rows], if MOVE
    codes,  # uint8 [count, rows]
    shifts,  # fp32 [count, rows]
    rows,
    count,
    HALF: tl.constexpr,
    MOVE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = row < rows
    places = column[:, None] * rows + row[None, :]
    left = tl.load(residual + places, mask=(column[:, None] < count) & inside[None, :], other=0.0)
    for index in tl.range(count):
        value = tl.sum(tl.where(column[:, None] == index, left, 0.0), axis=0)
        place = index * rows + row
        scale = tl.load(scales + place, mask=inside, other=1.0)
        # Divisions round to nearest as torch's do, so a code at a tie is the same.
        pivot = tl.load(matrix + index * count + index)
        if MOVE:
            before = tl.load(old + place, mask=inside, other=0).to(tl.float32) - HALF
            exact = tl.div_rn(tl.div_rn(value, tl.zeros_like(value) + pivot), scale) + before
        else:
            exact = tl.div_rn(value, scale)
        exact = tl.minimum(tl.maximum(exact, -HALF - 1.0), HALF + 0.0)  # small enough for the rounding below
        level = (exact + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to the nearest integer, ties to even
        level = tl.minimum(tl.maximum(level, -HALF + 0.0), HALF - 1.0)
        shift = (level - before) * scale if MOVE else tl.div_rn(value - level * scale, tl.zeros_like(value) + pivot)
        tl.store(codes + place, (level + HALF).to(tl.uint8), mask=inside)
        tl.store(shifts + place, shift, mask=inside)
        later = (column > index) & (column < count)
        left -= tl.load(matrix + index * count + column, mask=later, other=0.0)[:, None] * shift[None, :]


def launch(residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
    """Run `columns.solve_block` on a GPU; residual, scales and codes are contiguous."""
    count, rows = residual.shape
    new_codes = torch.empty(residual.shape, dtype=torch.uint8, device=residual.device)
    shifts = torch.empty_like(residual)
    block_kernel[(triton.cdiv(rows, ROWS),)](
        residual, matrix.contiguous(), scales, new_codes if codes is None else codes, new_codes, shifts, rows, count,
        HALF=half, MOVE=codes is not None, BLOCK=BLOCK, ROWS=ROWS, num_warps=1,
    )  # fmt: skip
    return new_codes, shifts
