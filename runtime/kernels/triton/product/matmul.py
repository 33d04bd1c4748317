"""Multiplies packed weights with the kernels of `product.gemm`, and many rows by a dense product."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.kernels.triton.product import tiles as triton_tiles
from mycli.runtime.kernels.triton.product.tiles import Chip, Tile
from mycli.runtime.kernels.triton.product.weight_layout import (
    TABLE_UNIT,
    layout_of,
    padded_k,
    repack,
    repack_scales,
    tile_k,
    to_gpu_packing,
    unpacked_k,
    zero_code,
)
from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import Packing

if TYPE_CHECKING:
    from mycli.runtime.kernels.triton.product.activation import Operand
    from mycli.runtime.kernels.triton.product.gemm import RmsScale
    from mycli.runtime.kernels.triton.product.grouped import Routed
    from mycli.runtime.kernels.triton.split_k import Epilogue

_DENSE_BYTES = 512 << 20  # largest piece of a weight that is unpacked in one go
_PDL_DRIVER = 12030  # first driver that captures programmatic dependent launches in a CUDA graph
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)
_SCALES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _driver() -> int:  # 12030 for CUDA 12.3, 0 without a driver
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def chip_of(device: torch.device) -> Chip:
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    pdl = capability >= (9, 0) and _driver() >= _PDL_DRIVER and torch.version.hip is None
    return Chip(capability, properties.multi_processor_count, pdl)


def uses_ptx() -> bool:
    """Return whether kernels may contain inline PTX: not in the interpreter, not on AMD."""
    import triton

    from mycli.runtime.kernels.triton.product.gemm import multiply_kernel

    return isinstance(multiply_kernel, triton.runtime.JITFunction) and torch.version.hip is None


def constants(packing: Packing, scale_dtype: torch.dtype, ptx: bool) -> dict[str, Any]:
    """Return the constants of `multiply_kernel` and `dequantize_kernel` that do not depend on the tile."""
    layout = layout_of(packing)
    return {
        "BITS": packing.bits,
        "TILE_K": tile_k(packing),
        "REPEATS": layout.repeats,
        "CHUNK_K": layout.chunk_k,
        "SCALE": _SCALES[scale_dtype],
        "CHANNEL": packing.group_size is None,
        # Of iq3_s, the odd numbers, UNIT and ZERO make what they make of integers.
        "CODES": "int" if packing.codes == "iq3_s" else packing.codes,
        "UNIT": TABLE_UNIT.get(packing.codes, 1.0),
        "ZERO": zero_code(packing),
        "ASM": ptx,
    }


def dequantize_warps(packing: Packing) -> int:
    """Return the warps of `dequantize_kernel`, each with the rows of one chunk."""
    return 2 if layout_of(packing).chunk_n == 128 else 4


@dataclass(frozen=True)
class Activation:
    """The operand of a product: fp16 [rows, K'], and per group of columns its power of two and sum.

    sums: fp32 [K' / tile_k, padded rows, 2]; padded rows are whole tiles. Columns of a permuted tile are in MMA order.
    rms: what the product divides the rows by, if they come from a norm. For a `DenseProduct` in bf16 the values are not
    scaled, and sums are [K / tile_k, padded rows, 0].
    """

    values: Tensor
    sums: Tensor
    tile: Tile
    rms: "RmsScale | None" = None

    @property
    def tiles(self) -> int:
        return self.sums.shape[0]

    @property
    def tile_k(self) -> int:
        return self.values.shape[1] // self.tiles

    @property
    def scaled_sums(self) -> Tensor | None:
        return self.sums if self.sums.shape[2] else None

    def operand(self) -> "Operand":
        """Return the arguments of kernels that write it."""
        from triton.language import constexpr

        from mycli.runtime.kernels.triton.product.activation import Operand

        constants = constexpr(self.tile_k), constexpr(self.tile.permuted)
        return Operand(self.values, self.scaled_sums, self.tiles, self.sums.shape[1], *constants)


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """Rows sorted by expert, and the weights of those experts, for one launch over all experts.

    codes, scales, offsets: int64 [experts], how far each expert's tensor is from the first one's, in units of 16 bytes;
    weights in 16 bits are `codes` without scales.
    starts: int32 [experts + 1], the rows of expert e are starts[e] to starts[e + 1]. tokens: int32 [count], the row of
    the input that each row reads, None for its own.
    """

    experts: int
    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    starts: Tensor
    tokens: Tensor | None
    count: int

    def max_tiles(self, rows: int) -> int:
        """The largest possible number of tiles of `rows` rows: each expert may have one that is not full."""
        hit = min(self.experts, self.count)
        return hit + (self.count - hit) // rows

    def arguments(self) -> "Routed":
        from triton import next_power_of_2
        from triton.language import constexpr

        from mycli.runtime.kernels.triton.product.grouped import Routed

        places = self.codes, self.scales, self.offsets
        return Routed(*places, self.starts, self.tokens, self.experts, constexpr(next_power_of_2(self.experts)))


def check_contiguous(*tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not contiguous, which the kernels rely on."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")


def _check(x: Tensor, columns: int) -> None:
    if x.dim() != 2 or x.shape[1] != columns or x.stride(1) != 1 or x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"activations {tuple(x.shape)} {x.dtype}, strides {x.stride()}: want 16 bits, [rows, {columns}]"
        )


def pieces(n: int, epilogue: "Epilogue") -> int:
    """Return the number of pieces of a product of n columns."""
    ranges: int = epilogue.RANGES.value
    span: int = epilogue.SPAN.value
    return -(-(n // ranges) // span)


def launch_epilogue(parts: Tensor, epilogue: "Epilogue", pdl: bool) -> None:
    """Run an epilogue on split-K parts fp32 [count, rows, n] in a launch of its own."""
    from mycli.runtime.kernels.triton.split_k import epilogue_kernel

    count, rows, n = parts.shape
    at_once = epilogue.arguments.ROWS.value
    grid, alone = (pieces(n, epilogue), -(-rows // at_once)), epilogue._replace(counters=None)
    epilogue_kernel[grid](parts, count, rows, alone, PDL=pdl, launch_pdl=pdl, num_warps=min(4, at_once))


def _add(parts: Tensor, dtype: torch.dtype) -> Tensor:
    from mycli.runtime.kernels.triton.split_k import reduce_kernel

    y = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    reduce_kernel[(-(-y.numel() // 1024),)](parts, y, parts.shape[0], y.numel(), BLOCK=1024)
    return y


class FewRowsProduct(ABC):
    """A weight [n, k] that multiplies few rows, in parts of K, and runs an epilogue."""

    n: int
    k: int
    chip: Chip
    k_stored: int  # columns of an operand: k and padding
    tile_k: int
    bits: int

    @abstractmethod
    def tile(self, rows: int) -> Tile:
        """Return the tile for `rows` activation rows; more rows than it has take several blocks."""

    @abstractmethod
    def activation(self, rows: int, tile: Tile | None = None) -> Activation:
        """Return an empty operand for `rows` rows, of `tile` or the one chosen for that number."""

    def _operand(self, values: Tensor, shape: Tile, sums: int) -> Activation:
        """Return an operand of `values` with room for `sums` numbers of each row and tile of K."""
        padded = -(-len(values) // shape.block_m) * shape.block_m
        stored = torch.empty((self.k_stored // self.tile_k, padded, sums), dtype=torch.float32, device=values.device)
        return Activation(values, stored, shape)

    @abstractmethod
    def _launch(self, grid: tuple[int, int, int], x: Activation, y: Tensor, arguments: Mapping[str, Any]) -> None:
        """Launch the product into y [parts, rows, n]; arguments: those that every such kernel has, by name."""

    def partial(
        self,
        x: Activation,
        dtype: torch.dtype = torch.float32,
        epilogue: "Epilogue | None" = None,
        routed: RoutedRows | None = None,
        next_first: bool = False,
    ) -> Tensor:
        """Return split-K parts of the product, fp32 [parts, rows, n] to be added in order; one part is in `dtype`.

        epilogue: run on each finished piece, of many rows by a second launch. routed: rows of experts, of which this
        weight is the first. next_first: the next launch may begin before the previous one has ended (`triton.pdl`).
        """
        shape, rows = x.tile, x.values.shape[0] if routed is None else routed.count
        columns, blocks = -(-self.n // shape.block_n), -(-rows // shape.block_m)
        # Experts count as one wider weight, each with a share of the rows.
        shares, wide = rows, self.n
        if routed is not None:
            blocks = routed.max_tiles(shape.block_m)
            shares, wide = -(-rows // blocks), columns * shape.block_n * blocks
        parts, part_tiles = triton_tiles.split(self.chip, shape, self.bits, shares, wide, self.k_stored, self.tile_k)
        y = torch.empty((parts, rows, self.n), dtype=dtype if parts == 1 else torch.float32, device=x.values.device)
        following, last = (None, epilogue) if shape.epilogue_in_product else (epilogue, None)
        if last is not None and (count := pieces(self.n, last)) > last.counters.numel():
            raise ValueError(f"{last.counters.numel()} counters are too few for {count} pieces of {rows} rows")
        arguments = {
            "rows": rows,
            "n": self.n,
            "rows_padded": x.sums.shape[1],
            "tiles_per_part": part_tiles,
            "rms": x.rms,
            "epilogue": last,
            "routed": None if routed is None else routed.arguments(),
            "BLOCK_N": shape.block_n,
            "BLOCK_M": shape.block_m,
            "WARPS": shape.warps,
            "PDL": self.chip.pdl,
            "NEXT_FIRST": next_first,
            "EPILOGUE": last is not None,
            "ROUTED": routed is not None,
            "launch_pdl": self.chip.pdl,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }
        self._launch((columns, parts, blocks), x, y, arguments)
        if following is not None:
            launch_epilogue(y, following, self.chip.pdl)
        return y

    def multiply(self, x: Activation, dtype: torch.dtype, routed: RoutedRows | None = None) -> Tensor:
        """Return the product [rows, n] in `dtype`, rounded once from fp32; `routed` as in `partial`."""
        y = self.partial(x, dtype, routed=routed)
        return y[0] if y.shape[0] == 1 else _add(y, dtype)


class TritonMatmul(FewRowsProduct):
    """A weight stored in the order of `product.weight_layout`."""

    def __init__(self, weight: PackedWeight, chip: Chip) -> None:
        weight = to_gpu_packing(weight)
        self.packing, self.chip = weight.packing, chip
        self.n, self.k = weight.out_features, weight.in_features
        self._layout, self.bits = layout_of(self.packing), self.packing.bits
        self.tile_k, self.k_stored = tile_k(self.packing), padded_k(self.packing, self.k)
        self.codes, self.scales = repack(weight), repack_scales(weight, weight.scales)
        self.offsets = None if weight.offsets is None else repack_scales(weight, weight.offsets)
        self._n_padded = self.codes.shape[0] * self._layout.chunk_n
        self._scale_dtype = weight.scales.dtype
        self._scratch: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.offsets) if tensor is not None)

    @property
    def shape_key(self) -> tuple[object, ...]:
        """Equal for weights of experts that can share a launch."""
        return self.n, self.k, self.packing, self._scale_dtype, self.chip

    def _constants(self) -> dict[str, Any]:
        return constants(self.packing, self._scale_dtype, uses_ptx())

    def tile(self, rows: int) -> Tile:
        return triton_tiles.tile(self.chip, self.packing, rows)

    def activation(self, rows: int, tile: Tile | None = None) -> Activation:
        values = torch.empty((rows, self.k_stored), dtype=torch.float16, device=self.codes.device)
        return self._operand(values, tile or self.tile(rows), 2)

    def prepare(self, x: Tensor, tile: Tile | None = None) -> Activation:
        """Return x [rows, K] as an operand for `multiply`."""
        from mycli.runtime.kernels.triton.product.activation import prepare_kernel

        _check(x, self.k)
        into = self.activation(x.shape[0], tile)
        tiles = 1024 // into.tile_k  # per program
        prepare_kernel[(x.shape[0], -(-into.tiles // tiles))](x, into.operand(), self.k, x.stride(0), TILES=tiles)
        return into

    def _launch(self, grid: tuple[int, int, int], x: Activation, y: Tensor, arguments: Mapping[str, Any]) -> None:
        from mycli.runtime.kernels.triton.product.gemm import multiply_kernel

        multiply_kernel[grid](
            self.codes, self.scales, self.offsets, x.values, x.sums, y, n_padded=self._n_padded, k_padded=self.k_stored,
            UNROLL=x.tile.unroll(self.tile_k, self.k_stored), PERMUTED=x.tile.permuted,
            **self._constants(), **arguments,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [rows, K] W^T in the dtype of x."""
        _check(x, self.k)
        if x.shape[0] == 0:
            return x.new_empty((0, self.n))
        if x.shape[0] <= triton_tiles.max_packed_rows(self.chip):
            return self.multiply(self.prepare(x), x.dtype)
        rows = self._dense_rows(x.element_size())
        pieces = [
            functional.linear(x, self._dense(first, min(first + rows, self.n), x.dtype, self._scratch))
            for first in range(0, self.n, rows)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _dense_rows(self, element_size: int) -> int:
        return max(512, _DENSE_BYTES // (self.k * element_size) // 512 * 512)

    def scratch_numbers(self, element_size: int) -> int:
        """Return how many numbers products of many rows unpack at a time."""
        return min(self.n, self._dense_rows(element_size)) * self.k

    def use_scratch(self, scratch: Tensor) -> None:
        """Unpack into `scratch` [at least `scratch_numbers`] for products of many rows in its dtype.

        Weights whose products follow each other on one stream may share it, graphs included.
        """
        self._scratch = scratch

    def _dense(self, first: int, last: int, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        from mycli.runtime.kernels.triton.product.gemm import dequantize_kernel

        warps = dequantize_warps(self.packing)
        block = self._layout.chunk_n * warps
        if scratch is not None and scratch.dtype == dtype:
            y = scratch[: (last - first) * self.k].view(last - first, self.k)
        else:
            y = torch.empty((last - first, self.k), dtype=dtype, device=self.codes.device)
        dequantize_kernel[(-(-(last - first) // block), self.k_stored // unpacked_k(self.packing))](
            self.codes, self.scales, self.offsets, y, first, last, self.k, self._n_padded, self.k_stored,
            **self._constants(), BLOCK_N=block, WARPS=warps, num_warps=warps,
        )  # fmt: skip
        return y

    def dequantize(self) -> Tensor:
        """Return the weight [N, K] in the dtype of its scales."""
        return self._dense(0, self.n, self._scale_dtype)
