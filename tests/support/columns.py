"""Problems for the loop over the columns of a block, and a comparison of its results."""

import torch
from torch import Tensor

from tests.support.random_tensors import generator

SHAPES = [(128, 24), (128, 1), (37, 200), (1, 5)]  # 200 rows: whole tiles of the native code, and a partial one


def problem(count: int, rows: int, half: int, move: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    drawing = generator(count + rows + half)
    inputs = torch.randn(4 * count, count, generator=drawing)
    hessian = inputs.T @ inputs / (4 * count)
    matrix = hessian if move else torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    scales = torch.rand(count, rows, generator=drawing) * 0.1 + 0.05
    scales *= torch.where(torch.rand(count, rows, generator=drawing) < 0.5, -1, 1)
    residual = torch.randn(count, rows, generator=drawing) * half * 0.08
    codes = torch.randint(0, 2 * half, (count, rows), generator=drawing).to(torch.uint8) if move else None
    return residual, matrix, scales, codes, half


def agree(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare codes and results; rounding may resolve a rare tie differently, after which that row diverges."""
    same = (actual[0] == expected[0]).all(dim=0)
    assert same.float().mean() >= 0.95 and not actual[1].isnan().any()
    assert torch.allclose(actual[1][:, same].double(), expected[1][:, same].double(), rtol=1e-3, atol=1e-4)
