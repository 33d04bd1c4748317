"""Q4_0: groups of 32 with an fp16 scale, levels -8 to 7."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    return [*blocks.factors, join(blocks.levels + 8, 4, 16)]


TYPE = BlockType("Q4_0", lambda: Integers(4, -8), encode)
