"""IQ4_NL: groups of 32 with an fp16 scale, levels of a table of 16."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Table

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def indices(levels: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(TABLE, dtype=torch.int16), levels.contiguous()).to(torch.int16)


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    return [*blocks.factors, join(indices(blocks.levels), 4, 16)]


TYPE = BlockType("IQ4_NL", lambda: Table(TABLE), encode)
