"""The loop over the columns of one block, each waiting for those before it: one launch on a GPU, one call on a CPU.

The rows of a matrix do not know of each other, so a launch has one program for every few rows. What a block leaves to
the columns after it is the business of the solvers. `columns_triton` is the same loop as device code.
"""

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.rounding import native_columns

BLOCK = 128  # columns


def solve_block(
    residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int
) -> tuple[Tensor, Tensor]:
    """New codes uint8 [C, N] and the shifts fp32 [C, N] that the columns after have to hear of.

    residual, scales fp32 [C, N], transposed: one row for each of C <= BLOCK columns; matrix fp32 [C, C]. In turn, for
    column i, with r what `residual` is after matrix[j, i] * shift[j] of all j < i was taken off:

    - `codes` None (GPTQ): the nearest level to r is taken, and the shift is (r - level * scale) / matrix[i, i];
    - else (coordinate descent): the level moves by r / matrix[i, i], and the shift is how far the weight moved.

    A level is a code less `half`.
    """
    if residual.is_cuda:
        from mycli.quant.rounding.columns_triton import launch

        return launch(residual, matrix, scales, codes, half)
    solved = native_columns(residual, matrix, scales, codes, half)
    return solve_plainly(residual, matrix, scales, codes, half) if isinstance(solved, Declined) else solved


def solve_plainly(
    residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int
) -> tuple[Tensor, Tensor]:
    """As `solve_block`, in plain torch: where there is no native code, and its twin."""
    found = torch.empty(residual.shape, dtype=torch.uint8)
    shifts = torch.zeros_like(residual)
    for index in range(len(residual)):
        value = torch.addmv(residual[index], shifts[:index].T, matrix[:index, index], alpha=-1)
        scale, pivot = scales[index], matrix[index, index]
        if codes is None:
            level = (value / scale).round_().clamp_(-half, half - 1)
            torch.div(value.sub_(level * scale), pivot, out=shifts[index])
        else:
            old = codes[index].float().sub_(half)
            level = value.div_(pivot).div_(scale).add_(old).round_().clamp_(-half, half - 1)
            torch.mul(level - old, scale, out=shifts[index])
        found[index] = level + half
    return found, shifts
