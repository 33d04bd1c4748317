"""IQ4_XS: 8 groups of 32 in a super-block, levels of the table of IQ4_NL, signed scales of six bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, multiples_by_block, rows_of
from mycli.quant.ggml.levels import Table
from mycli.quant.ggml.types.iq4_nl import TABLE, indices


def encode(solved: SolvedRows) -> Tensor:
    scales = multiples_by_block(solved.multiples, solved.factors.shape[1]) + 32
    levels = indices(levels_by_block(solved, 256))
    parts = [*factors_by_block(solved), join(scales >> 4, 2, 1), join(scales & 15, 4, 1), join(levels, 4, 16)]
    return rows_of(parts, solved.levels.shape[1])


TYPE = BlockType("IQ4_XS", lambda: Table(TABLE), encode, Multiples(-32, 64))
