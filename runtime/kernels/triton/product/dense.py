"""The product of a 16-bit weight and few rows, between the packed products of a fused pass."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.triton.product.matmul import (
    Activation,
    check_contiguous,
    check_counters,
    launch_epilogue,
    uses_ptx,
)
from mycli.runtime.kernels.triton.product.tiles import Chip, Tile, split

if TYPE_CHECKING:
    from mycli.runtime.kernels.triton.split_k import Epilogue

_BLOCK_N, _WARPS = 64, 4
_TILES_K = (128, 64, 32)  # columns of an iteration: whole cache lines of each row of the weight
_ROWS = (8, 16, 32, 64)  # of a tile
_BITS = 16


class DenseProduct:
    """A weight [n, k] as stored, which a fused pass multiplies as a `TritonMatmul`."""

    def __init__(self, weight: Tensor, chip: Chip) -> None:
        """Raises ValueError for a weight that `decline_dense` declines."""
        if decline_dense(weight) is not None:
            raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype}")
        check_contiguous(weight)
        self.weight, self.chip = weight, chip
        self.n, self.k = weight.shape
        self._tile_k = next(size for size in _TILES_K if self.k % size == 0)

    def tile(self, rows: int) -> Tile:
        """Return the tile for `rows` activation rows; more than 64 take several blocks."""
        block_m = next((size for size in _ROWS if rows <= size), _ROWS[-1])
        stages = 4 if block_m < 64 and self.chip.shared > 128 << 10 else 3
        return Tile(block_m, _BLOCK_N, _WARPS, self._tile_k, stages, blocks=2, permuted=False)

    def activation(self, rows: int, tile: Tile | None = None) -> Activation:
        """Return an empty operand for `rows` rows: bf16 as it is, fp16 scaled by powers of two."""
        shape = tile or self.tile(rows)
        padded, device, dtype = -(-rows // shape.block_m) * shape.block_m, self.weight.device, self.weight.dtype
        scaled = 2 if dtype is torch.float16 else 0
        sums = torch.empty((self.k // self._tile_k, padded, scaled), dtype=torch.float32, device=device)
        return Activation(torch.empty((rows, self.k), dtype=dtype, device=device), sums, shape)

    def partial(
        self,
        x: Activation,
        dtype: torch.dtype = torch.float32,
        epilogue: "Epilogue | None" = None,
        next_first: bool = False,
    ) -> Tensor:
        """Return split-K parts of the product, as `TritonMatmul.partial`."""
        from mycli.runtime.kernels.triton.product.dense_kernel import dense_kernel

        shape, rows = x.tile, x.values.shape[0]
        parts, part_tiles = split(self.chip, shape, _BITS, rows, self.n, self.k, self._tile_k)
        y = torch.empty((parts, rows, self.n), dtype=dtype if parts == 1 else torch.float32, device=x.values.device)
        following, last = (None, epilogue) if shape.epilogue_in_product else (epilogue, None)
        check_counters(last, self.n, rows)
        dense_kernel[(-(-self.n // _BLOCK_N), parts, -(-rows // shape.block_m))](
            self.weight, x.values, x.scaled_sums, y,
            rows, self.n, self.k, x.sums.shape[1], part_tiles, x.rms, last,
            BLOCK_N=_BLOCK_N, BLOCK_M=shape.block_m, TILE_K=self._tile_k, WARPS=_WARPS, DOT=_dot(self.weight.dtype),
            PDL=self.chip.pdl, NEXT_FIRST=next_first, launch_pdl=self.chip.pdl, EPILOGUE=last is not None,
            num_warps=_WARPS, num_stages=shape.stages,
        )  # fmt: skip
        if following is not None:
            launch_epilogue(y, following, self.chip.pdl)
        return y


def decline_dense(weight: Tensor) -> Declined | None:
    """Return why a weight [n, k] cannot be a `DenseProduct`, or None."""
    if weight.shape[1] % _TILES_K[-1] or weight.dtype not in (torch.bfloat16, torch.float16):
        return Declined("dense-product-shape", {"columns": weight.shape[1], "dtype": str(weight.dtype)})
    return None


def _dot(dtype: torch.dtype) -> object:
    import triton.language as tl

    if dtype is torch.float16:
        return tl.float16
    return tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter would multiply bf16 as integers
