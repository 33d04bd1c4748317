"""The product of a 16-bit weight, or of experts', and few rows: in a fused pass between packed ones, or routed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.triton.product.matmul import (
    ACTIVATION_DTYPES,
    Activation,
    FewRowsProduct,
    check_contiguous,
    uses_ptx,
)
from mycli.runtime.kernels.triton.product.tiles import Chip, Tile

_BLOCK_N, _WARPS = 64, 4
_TILES_K = (128, 64, 32)  # columns of an iteration: whole cache lines of each row of the weight
_ROWS = (8, 16, 32, 64)  # of a tile
_BITS = 16


class DenseProduct(FewRowsProduct):
    """A weight [n, k] as stored, which is multiplied as a `TritonMatmul`."""

    def __init__(self, weight: Tensor, chip: Chip) -> None:
        """Raises ValueError for a weight that `decline_dense` declines."""
        if decline_dense(weight) is not None:
            raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype}, strides {weight.stride()}")
        self.weight, self.chip = weight, chip
        self.n, self.k = weight.shape
        self.bits, self.k_stored = _BITS, self.k
        self.tile_k = next(size for size in _TILES_K if self.k % size == 0)

    @property
    def shape_key(self) -> tuple[object, ...]:
        """Equal for weights of experts that can share a launch."""
        return self.n, self.k, self.weight.dtype, self.chip

    def tile(self, rows: int) -> Tile:
        block_m = next((size for size in _ROWS if rows <= size), _ROWS[-1])
        stages = 4 if block_m < 64 and self.chip.shared > 128 << 10 else 3
        return Tile(block_m, _BLOCK_N, _WARPS, self.tile_k, stages, blocks=2, permuted=False)

    def activation(self, rows: int, tile: Tile | None = None) -> Activation:
        """Return an empty operand for `rows` rows: bf16 as it is, fp16 scaled by powers of two."""
        dtype = self.weight.dtype
        values = torch.empty((rows, self.k), dtype=dtype, device=self.weight.device)
        return self._operand(values, tile or self.tile(rows), 2 if dtype is torch.float16 else 0)

    def prepare(self, x: Tensor, tile: Tile | None = None) -> Activation:
        """Return x [rows, k] itself as an operand for `multiply`."""
        check_contiguous(x)
        if x.shape[1] != self.k or x.dtype != self.weight.dtype:
            raise ValueError(f"activations {tuple(x.shape)} {x.dtype}: want {self.weight.dtype}, [rows, {self.k}]")
        return self._operand(x, tile or self.tile(len(x)), 0)

    def _launch(self, grid: tuple[int, int, int], x: Activation, y: Tensor, arguments: Mapping[str, Any]) -> None:
        from mycli.runtime.kernels.triton.product.dense_kernel import dense_kernel

        dense_kernel[grid](
            self.weight, x.values, x.scaled_sums, y, k=self.k_stored,
            TILE_K=self.tile_k, DOT=_dot(self.weight.dtype), **arguments,
        )  # fmt: skip


def decline_dense(weight: Tensor) -> Declined | None:
    """Return why a weight [n, k] cannot be a `DenseProduct`, or None."""
    whole = weight.shape[1] % _TILES_K[-1] == 0 and weight.is_contiguous()
    if not whole or weight.dtype not in ACTIVATION_DTYPES:
        return Declined("dense-product-shape", {"columns": weight.shape[1], "dtype": str(weight.dtype)})
    return None


def _dot(dtype: torch.dtype) -> object:
    import triton.language as tl

    if dtype is torch.float16:
        return tl.float16
    return tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter would multiply bf16 as integers
