"""IQ2_XS: 16 groups of 16 in a super-block, 512 vectors of eight, even signs, odd scales of four bits."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import codebook_rows, factors_by_block, join, levels_by_block, multiples_by_block, rows_of
from mycli.quant.ggml.levels import Codebook
from mycli.runtime.checkpoint.gguf.codebooks import codebook


def encode(solved: SolvedRows) -> Tensor:
    scales = multiples_by_block(solved.multiples, solved.factors.shape[1]) >> 1
    rows, signs = codebook_rows(levels_by_block(solved, 256), codebook("IQ2_XS"))
    words = rows | (join(signs, 1, 1) & 127).to(torch.int32) << 9
    low_high = torch.stack([words & 255, words >> 8], dim=2).flatten(1)
    return rows_of([*factors_by_block(solved), low_high, join(scales, 4, 1)], solved.levels.shape[1])


TYPE = BlockType(
    "IQ2_XS",
    lambda: Codebook(codebook("IQ2_XS"), even_signs=True),
    encode,
    Multiples(1, 16, 2),
    unit=0.125,
)
