"""Q3_K: 16 groups of 16 in a super-block, levels -4 to 3, signed scales of six bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    scales, levels = blocks.scales + 32, blocks.levels + 4
    return [
        join(levels >> 2, 1, 32),
        join(levels & 3, 2, 32),
        join(scales & 15, 4, 8),
        join(scales >> 4, 2, 4),
        *blocks.factors,
    ]


TYPE = BlockType("Q3_K", lambda: Integers(3, -4), encode, Multiples(-32, 64))
