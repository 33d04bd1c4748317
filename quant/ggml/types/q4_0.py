"""Q4_0: groups of 32 with an fp16 scale, levels -8 to 7."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    levels = levels_by_block(solved, 32) + 8
    return rows_of([*factors_by_block(solved), join(levels, 4, 16)], solved.levels.shape[1])


TYPE = BlockType("Q4_0", lambda: Integers(4, -8), encode)
