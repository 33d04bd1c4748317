"""Which tile the Triton matmul uses, from the chip, the packing and the number of rows: a table, never a measurement.

The table (`tiles.json`) is kept per compute capability and says whether it was tuned on such a chip. Imports
neither torch nor Triton.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from mycli.runtime.quantization.scheme import Packing

_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # KiB


@dataclass(frozen=True)
class Chip:
    """What the choice depends on: compute capability and number of multiprocessors.

    pdl: launches may begin before the one before them ends (programmatic dependent launch, `triton.pdl`).
    """

    capability: tuple[int, int]
    processors: int
    pdl: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program may have (CUDA programming guide, compute capabilities)."""
        return _SHARED.get(self.capability, 99) << 10


@dataclass(frozen=True)
class Tile:
    """One program's share: `block_n` weight rows times `block_m` activation rows, `turn` columns of K at a time.

    blocks: programs that fit on a multiprocessor; permuted: activations come in the order of the MMA's columns.
    """

    block_m: int
    block_n: int
    warps: int
    turn: int
    stages: int
    blocks: int
    permuted: bool

    def unroll(self, tile_k: int, k: int) -> int:
        """Groups of `tile_k` columns in one turn: a power of two that divides the groups in `k`."""
        unroll = max(1, self.turn // tile_k)
        while k // tile_k % unroll:
            unroll //= 2
        return unroll

    def rows_at_once(self, rows: int, columns: int) -> int:
        """Of `columns` fp32 numbers, a power of two: all of up to 8, else what threads hold with 16 numbers each."""
        most = self.block_m if self.block_m <= 8 else min(self.block_m, max(1, 512 * self.warps // columns))
        return min(1 << (rows - 1).bit_length(), 1 << (most.bit_length() - 1))


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    text = resources.files("mycli.runtime.kernels.triton.product").joinpath("tiles.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _family(chip: Chip) -> dict[str, Any]:
    table = _table()
    family: dict[str, Any] = table.get(str(chip.capability[0]), table["8"])
    return family


def most_packed_rows(chip: Chip) -> int:
    """For more rows than this, unpacking the whole weight and one dense product is faster."""
    return int(_family(chip)["dense_rows"])


def tile(chip: Chip, packing: Packing, rows: int) -> Tile:
    """The tile for `rows` activation rows; more than the widest tile take several passes."""
    group = packing.group_size or 128
    rules = [rule for rule in _family(chip)["rules"] if packing.bits in rule["bits"] and group in rule["group"]]
    rule = next((rule for rule in rules if rows <= rule["rows"]), rules[-1])
    # wgmma reads its columns from shared memory as they lie; the older MMA takes them through registers.
    permuted = chip.capability[0] == 9 and rule["rows"] > 8
    numbers = {field: rule[field] for field in ("block_n", "warps", "turn", "stages", "blocks")}
    return Tile(rule["rows"], **numbers, permuted=permuted)


def parts(chip: Chip, shape: Tile, packing: Packing, rows: int, n: int, k: int, tile_k: int) -> tuple[int, int]:
    """(parts, groups of `tile_k` a part) into which K is split so that the programs fill the chip in one wave.

    The partial sums, 4 bytes for each part, row and output, may be an eighth of the weight's bytes.
    """
    programs = -(-n // shape.block_n) * -(-rows // shape.block_m)
    slots = chip.processors * shape.blocks
    bound = max(1, k * packing.bits // (8 * 32 * rows))
    return even_parts(shape, max(1, min(slots // programs, bound)), k, tile_k)


def even_parts(shape: Tile, wanted: int, k: int, tile_k: int) -> tuple[int, int]:
    """(parts, groups of `tile_k` a part) of K: `wanted` of them, or fewer where they would not be whole turns."""
    unroll, tiles = shape.unroll(tile_k, k), k // tile_k
    each = -(-tiles // (wanted * unroll)) * unroll
    return -(-tiles // each), each
