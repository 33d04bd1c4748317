"""IQ2_XXS: 8 groups of 32 in a super-block, 256 vectors of eight, even signs, odd scales of four bits."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import (
    codebook_rows,
    factors_by_block,
    levels_by_block,
    multiples_by_block,
    rows_of,
    signs_with_scale,
)
from mycli.quant.ggml.levels import Codebook
from mycli.runtime.checkpoint.gguf.codebooks import codebook


def encode(solved: SolvedRows) -> Tensor:
    scales = multiples_by_block(solved.multiples, solved.factors.shape[1]) >> 1
    rows, signs = codebook_rows(levels_by_block(solved, 256), codebook("IQ2_XXS"))
    words = torch.cat(
        [rows.view(-1, 8, 4).to(torch.uint8), signs_with_scale(signs, scales).view(-1, 8, 4)], dim=2
    ).flatten(1)
    return rows_of([*factors_by_block(solved), words], solved.levels.shape[1])


TYPE = BlockType(
    "IQ2_XXS",
    lambda: Codebook(codebook("IQ2_XXS"), even_signs=True),
    encode,
    Multiples(1, 16, 2),
    unit=0.125,
)
