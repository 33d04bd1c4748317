"""Q8_0: groups of 32 with an fp16 scale, levels -128 to 127."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, levels_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    return rows_of([*factors_by_block(solved), levels_by_block(solved, 32) & 255], solved.levels.shape[1])


TYPE = BlockType("Q8_0", lambda: Integers(8, -128), encode)
