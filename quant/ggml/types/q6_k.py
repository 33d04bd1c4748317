"""Q6_K: 16 groups of 16 in a super-block, levels -32 to 31, scales of one signed byte."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    levels = blocks.levels + 32
    return [join(levels & 15, 4, 64), join(levels >> 4, 2, 32), blocks.scales & 255, *blocks.factors]


TYPE = BlockType("Q6_K", lambda: Integers(6, -32), encode, Multiples(-128, 256))
