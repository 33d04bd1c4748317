"""Q5_0: groups of 32 with an fp16 scale, levels -16 to 15."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    levels = blocks.levels + 16
    return [*blocks.factors, join(levels >> 4, 1, 1), join(levels & 15, 4, 16)]


TYPE = BlockType("Q5_0", lambda: Integers(5, -16), encode)
