"""Q8_0: groups of 32 with an fp16 scale, levels -128 to 127."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedBlocks
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    return [*blocks.factors, blocks.levels & 255]


TYPE = BlockType("Q8_0", lambda: Integers(8, -128), encode)
