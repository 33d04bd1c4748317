"""Q5_K: 8 groups of 32 in a super-block, levels 0 to 31, scales and minima of six bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedBlocks
from mycli.quant.ggml.blocks import join, six_bits
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    return [*blocks.factors, six_bits(blocks), join(blocks.levels >> 4, 1, 32), join(blocks.levels & 15, 4, 32)]


TYPE = BlockType("Q5_K", lambda: Integers(5, 0), encode, Multiples(0, 64), Multiples(0, 64))
