"""Chooses the tile of a product from chip, packing and number of rows: a table (`tiles.json`), never a measurement."""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from mycli.runtime.quantization.scheme import Packing

# The table says for each compute capability whether it was tuned on such a chip. Imports neither torch nor Triton.

_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # KiB


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that decide the tile; pdl: programmatic dependent launch works (`triton.pdl`)."""

    capability: tuple[int, int]
    processors: int
    pdl: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory per program (CUDA programming guide, compute capabilities)."""
        return _SHARED.get(self.capability, 99) << 10


@dataclass(frozen=True)
class Tile:
    """The share of a program: `block_n` weight rows times `block_m` activation rows, `block_k` columns per iteration.

    blocks: programs per multiprocessor; permuted: columns of activations are in MMA order.
    """

    block_m: int
    block_n: int
    warps: int
    block_k: int
    stages: int
    blocks: int
    permuted: bool

    def unroll(self, tile_k: int, k: int) -> int:
        """Return the groups of `tile_k` columns per iteration: a power of two that divides the groups of `k`."""
        unroll = max(1, self.block_k // tile_k)
        while k // tile_k % unroll:
            unroll //= 2
        return unroll

    @property
    def epilogue_in_product(self) -> bool:
        """Return whether the programs of a product run its epilogue, or a launch of its own."""
        return self.block_m <= 8

    def rows_at_once(self, rows: int) -> int:
        """Return how many rows a program of an epilogue handles, a power of two."""
        return min(1 << (rows - 1).bit_length(), self.block_m if self.epilogue_in_product else 4)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    text = resources.files("mycli.runtime.kernels.triton.product").joinpath("tiles.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _family(chip: Chip) -> dict[str, Any]:
    table = _table()
    family: dict[str, Any] = table.get(str(chip.capability[0]), table["8"])
    return family


def max_packed_rows(chip: Chip) -> int:
    """Return the number of rows above which a dense product of the dequantized weight is faster."""
    return int(_family(chip)["dense_rows"])


def tile(chip: Chip, packing: Packing, rows: int) -> Tile:
    """Return the tile for `rows` activation rows; more rows than the widest tile take several blocks."""
    group = packing.group_size or 128
    rules = [
        rule
        for rule in _family(chip)["rules"]
        if packing.bits in rule["bits"] and group in rule["group"] and packing.offsets >= rule.get("offsets", False)
    ]
    rule = next((rule for rule in rules if rows <= rule["rows"]), rules[-1])
    # wgmma reads its columns from shared memory as they lie; the older MMA takes them through registers.
    permuted = chip.capability[0] == 9 and rule["rows"] > 8
    numbers = {field: rule[field] for field in ("block_n", "warps", "block_k", "stages", "blocks")}
    return Tile(rule["rows"], **numbers, permuted=permuted)


def split(chip: Chip, shape: Tile, bits: int, rows: int, n: int, k: int, tile_k: int) -> tuple[int, int]:
    """Return (parts of K, groups of `tile_k` per part), so that the programs fill the chip in one wave.

    The partial sums, 4 bytes per part, row and output, may take up to a share of the weight's bytes, by the table.
    """
    programs = -(-n // shape.block_n) * -(-rows // shape.block_m)
    slots = chip.processors * shape.blocks
    bound = max(1, int(_family(chip).get("partial_sums", 0.125) * k * bits) // (32 * rows))
    return even_parts(shape, max(1, min(slots // programs, bound)), k, tile_k)


def even_parts(shape: Tile, count: int, k: int, tile_k: int) -> tuple[int, int]:
    """Return (parts of K, groups of `tile_k` per part): `count` parts, or fewer so that each is whole iterations."""
    unroll, tiles = shape.unroll(tile_k, k), k // tile_k
    share = -(-tiles // (count * unroll)) * unroll
    return -(-tiles // share), share
