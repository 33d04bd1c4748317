"""IQ4_NL: groups of 32 with an fp16 scale, levels of a table of 16."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedRows
from mycli.quant.ggml.blocks import factors_by_block, join, levels_by_block, rows_of
from mycli.quant.ggml.levels import Table

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def indices(levels: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(TABLE, dtype=torch.int16), levels.contiguous()).to(torch.int16)


def encode(solved: SolvedRows) -> Tensor:
    levels = indices(levels_by_block(solved, 32))
    return rows_of([*factors_by_block(solved), join(levels, 4, 16)], solved.levels.shape[1])


TYPE = BlockType("IQ4_NL", lambda: Table(TABLE), encode)
