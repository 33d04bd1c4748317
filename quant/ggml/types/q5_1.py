"""Q5_1: groups of 32 with an fp16 scale and minimum, levels 0 to 31."""

from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import ONE, BlockType, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, rows_of
from mycli.quant.ggml.levels import Integers


def encode(solved: SolvedRows) -> Tensor:
    scales, minima = factors_by_block(replace(solved, factors=solved.factors * torch.tensor([1.0, -1.0]).view(2, 1, 1)))
    levels = levels_by_block(solved, 32)
    return rows_of([scales, minima, join(levels >> 4, 1, 1), join(levels & 15, 4, 16)], solved.levels.shape[1])


TYPE = BlockType("Q5_1", lambda: Integers(5, 0), encode, minima=ONE)
