"""Q4_1: groups of 32 with an fp16 scale and minimum, levels 0 to 15."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import ONE, BlockType, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Integers


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    scales, minima = blocks.factors
    added = minima ^ torch.tensor([0, 0x80], dtype=torch.uint8)  # the sign bit: readers add the minimum
    return [scales, added, join(blocks.levels, 4, 16)]


TYPE = BlockType("Q4_1", lambda: Integers(4, 0), encode, minima=ONE)
