"""Q5_K: 8 groups of 32 in a super-block, levels 0 to 31, scales and minima of six bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, multiples_by_block, rows_of, six_bits
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    blocks = solved.factors.shape[1]
    assert solved.minima is not None
    header = six_bits(multiples_by_block(solved.multiples, blocks), multiples_by_block(solved.minima, blocks))
    levels = levels_by_block(solved, 256)
    parts = [*factors_by_block(solved), header, join(levels >> 4, 1, 32), join(levels & 15, 4, 32)]
    return rows_of(parts, solved.levels.shape[1])


TYPE = BlockType("Q5_K", lambda: Integers(5, 0), encode, Multiples(0, 64), Multiples(0, 64))
