"""Q6_K: 16 groups of 16 in a super-block, levels -32 to 31, scales of one signed byte."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, multiples_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    scales = multiples_by_block(solved.multiples, solved.factors.shape[1]) & 255
    levels = levels_by_block(solved, 256) + 32
    parts = [join(levels & 15, 4, 64), join(levels >> 4, 2, 32), scales, *factors_by_block(solved)]
    return rows_of(parts, solved.levels.shape[1])


TYPE = BlockType("Q6_K", lambda: Integers(6, -32), encode, Multiples(-128, 256))
