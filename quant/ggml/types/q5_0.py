"""Q5_0: groups of 32 with an fp16 scale, levels -16 to 15."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    levels = levels_by_block(solved, 32) + 16
    parts = [*factors_by_block(solved), join(levels >> 4, 1, 1), join(levels & 15, 4, 16)]
    return rows_of(parts, solved.levels.shape[1])


TYPE = BlockType("Q5_0", lambda: Integers(5, -16), encode)
