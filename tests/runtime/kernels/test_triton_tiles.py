"""Test the tile table: complete, within the kernels' assumptions, and K splits that cover it once."""

import pytest

from mycli.runtime.kernels.triton.product.tiles import Chip, max_packed_rows, split, tile
from mycli.runtime.kernels.triton.product.weight_layout import layout_of, padded_k, tile_k
from mycli.runtime.memory.graphs import PARTIAL_SUMS
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing

CHIPS = [Chip(capability, 132) for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0))]
PACKINGS = [Packing(bits, group) for bits in BITS for group in (*GROUP_SIZES, None)]


@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_every_packing_has_a_tile(packing: Packing, chip: Chip) -> None:
    for rows in (1, 8, 9, 16, 17, 33, 64, 65, max_packed_rows(chip)):
        shape = tile(chip, packing, rows)
        assert shape.block_m >= min(rows, 16)
        assert shape.block_n % (layout_of(packing).chunk_n * shape.warps) == 0, "a warp's rows are whole chunks"
        assert shape.block_m > 8 or not shape.permuted


@pytest.mark.parametrize("size", [(6144, 4096), (4096, 14336), (128256, 4096), (64, 96), (4096, 4224)], ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_parts_cover_k_once(packing: Packing, size: tuple[int, int]) -> None:
    n, k = size
    for chip in CHIPS:
        for rows in (1, 8, 64):
            shape, columns, kept = tile(chip, packing, rows), tile_k(packing), padded_k(packing, k)
            count, each = split(chip, shape, packing.bits, rows, n, kept, columns)
            tiles, unroll = kept // columns, shape.unroll(columns, kept)
            assert tiles % unroll == 0 and each % unroll == 0
            assert (count - 1) * each < tiles <= count * each
            least = 1 if chip.capability == (9, 0) else 8
            assert least * 4 * 8 * count * rows <= max(kept * packing.bits, least * 32 * rows), "a share of the weight"


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_partial_sums_are_those_that_the_estimate_counts(packing: Packing) -> None:
    for chip in (Chip(chip.capability, 188) for chip in CHIPS):  # as many multiprocessors as any chip has
        for rows in (1, 8, 16, 32, 64, 256):
            shape = tile(chip, packing, rows)
            for n, k in ((6144, 4096), (4096, 14336), (28672, 4096), (512, 32768)):
                count, _ = split(chip, shape, packing.bits, rows, n, padded_k(packing, k), tile_k(packing))
                assert count == 1 or 4 * count * rows * n <= PARTIAL_SUMS


def test_speculation_costs_the_same_tile() -> None:
    """Check that one to eight rows use one kernel, so that verifying draft tokens is free up to that number."""
    for chip in CHIPS:
        for packing in PACKINGS:
            assert len({tile(chip, packing, rows) for rows in range(1, 9)}) == 1
