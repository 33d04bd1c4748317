"""Multiplies random weights in Triton and decodes the operands of the products. Needs Triton."""

import torch
from torch import Tensor

from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.quantization.scheme import Packing
from tests.support.random_tensors import weight


def product(k: int, packing: Packing, processors: int = 1, n: int = 16) -> TritonMatmul:
    return TritonMatmul(weight(packing, n, k, 0), Chip((9, 0), processors))


def numbers(activation: Activation) -> Tensor:
    """Return the values of an operand, [rows, K'], fp32, and check its sums."""
    rows, tiles = activation.values.shape[0], activation.tiles
    scaled = activation.values.float().view(rows, tiles, -1) * activation.sums[:, :rows, 0].t().unsqueeze(-1)
    torch.testing.assert_close(scaled.sum(-1).t(), activation.sums[:, :rows, 1], rtol=1e-4, atol=1e-4)
    flat = scaled.view(rows, -1)
    if activation.tile.permuted:  # (pair of pairs, k half, t, pair) -> (t, pair of pairs, k half, pair)
        flat = flat.view(rows, -1, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(rows, -1)
    return flat


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
