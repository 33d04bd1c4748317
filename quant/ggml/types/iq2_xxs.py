"""IQ2_XXS: 8 groups of 32 in a super-block, 256 vectors of eight, even signs, odd scales of four bits."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import SolvedBlocks
from mycli.quant.ggml.blocks import signs_with_scale
from mycli.quant.ggml.codebook_type import codebook_rows, codebook_type


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    rows, signs = codebook_rows(blocks.levels, "IQ2_XXS")
    words = [part.view(-1, 8, 4) for part in (rows.to(torch.uint8), signs_with_scale(signs, blocks.scales >> 1))]
    return [*blocks.factors, torch.cat(words, dim=2).flatten(1)]


TYPE = codebook_type("IQ2_XXS", encode, even_signs=True, unit=0.125)
