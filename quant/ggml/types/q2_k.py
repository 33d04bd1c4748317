"""Q2_K: 16 groups of 16 in a super-block, levels 0 to 3, scales and minima of four bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, multiples_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    blocks = solved.factors.shape[1]
    assert solved.minima is not None
    scales = multiples_by_block(solved.multiples, blocks) | multiples_by_block(solved.minima, blocks) << 4
    levels = join(levels_by_block(solved, 256), 2, 32)
    return rows_of([scales, levels, *factors_by_block(solved)], solved.levels.shape[1])


TYPE = BlockType("Q2_K", lambda: Integers(2, 0), encode, Multiples(0, 16), Multiples(0, 16))
