"""Q2_K: 16 groups of 16 in a super-block, levels 0 to 3, scales and minima of four bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    assert blocks.minima is not None
    return [blocks.scales | blocks.minima << 4, join(blocks.levels, 2, 32), *blocks.factors]


TYPE = BlockType("Q2_K", lambda: Integers(2, 0), encode, Multiples(0, 16), Multiples(0, 16))
