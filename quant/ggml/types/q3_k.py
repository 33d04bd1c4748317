"""Q3_K: 16 groups of 16 in a super-block, levels -4 to 3, signed scales of six bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, multiples_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    scales = multiples_by_block(solved.multiples, solved.factors.shape[1]) + 32
    levels = levels_by_block(solved, 256) + 4
    parts = [
        join(levels >> 2, 1, 32),
        join(levels & 3, 2, 32),
        join(scales & 15, 4, 8),
        join(scales >> 4, 2, 4),
        *factors_by_block(solved),
    ]
    return rows_of(parts, solved.levels.shape[1])


TYPE = BlockType("Q3_K", lambda: Integers(3, -4), encode, Multiples(-32, 64))
