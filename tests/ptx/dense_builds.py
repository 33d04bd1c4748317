"""List the product of 16-bit weights between packed ones and of experts, as `builds` lists the others."""

from collections.abc import Iterator

import torch
import triton.language as tl

from mycli.runtime.kernels.triton.product.activation import Operand
from mycli.runtime.kernels.triton.product.dense import DenseProduct
from mycli.runtime.kernels.triton.product.dense_kernel import dense_kernel
from mycli.runtime.kernels.triton.product.gemm import RmsScale
from mycli.runtime.kernels.triton.product.grouped import Routed
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.kernels.triton.residual import ResidualArguments, add_epilogue
from mycli.runtime.kernels.triton.split_k import Epilogue
from tests.ptx.build import Build

_RMS = RmsScale("*fp32", "i32", "i32", "fp32", 32)
_OPERAND = Operand("*fp16", "*fp32", "i32", "i32", 128, True)


def dense_builds(capability: int) -> Iterator[Build]:
    """Yield products of 128 columns per iteration in bf16 and fp16, after a norm and before the stream."""
    chip = Chip(divmod(capability, 10), 132)
    added = ResidualArguments("*bf16", "i32", "*bf16", "*fp32", _OPERAND, 8, 1)
    of = Routed("*i64", None, None, "*i32", "*i32", "i32", 128)
    for dtype, rows, how in (
        (torch.bfloat16, 1, ""),
        (torch.bfloat16, 1, " add"),
        (torch.bfloat16, 1, " of experts"),
        (torch.bfloat16, 16, ""),
        (torch.bfloat16, 32, ""),
        (torch.bfloat16, 64, ""),
        (torch.bfloat16, 64, " of experts"),
        (torch.float16, 1, ""),
    ):
        tile = DenseProduct(torch.empty(64, 128, dtype=dtype), chip).tile(rows)
        name, scaled = ("fp16", "*fp32") if dtype is torch.float16 else ("bf16", None)
        sizes = dict.fromkeys(("rows", "n", "k", "rows_padded", "tiles_per_part"), "i32")
        adds, routed = how == " add", of if how == " of experts" else None
        epilogue = Epilogue(add_epilogue, "*i32", added, 128, 1) if adds else None
        yield Build(
            f"multiply {name} rows {tile.block_m}{how}",
            dense_kernel,
            {"weight": f"*{name}", "x": f"*{name}", "sums": scaled, "y": "*fp32", **sizes}
            | {"rms": None if how else _RMS, "epilogue": epilogue, "routed": routed},
            {
                "BLOCK_N": tile.block_n,
                "BLOCK_M": tile.block_m,
                "TILE_K": tile.block_k,
                "WARPS": tile.warps,
                "DOT": tl.float16 if scaled else tl.bfloat16,
                "PDL": capability >= 90,
                "NEXT_FIRST": adds,
                "EPILOGUE": adds,
                "ROUTED": routed is not None,
            },
            tile.warps,
            tile.stages,
            weights=tile.block_n * tile.block_k,
            unaligned=("rows", "rows_padded", "tiles_per_part", "pieces"),
        )
