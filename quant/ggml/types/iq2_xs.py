"""IQ2_XS: 16 groups of 16 in a super-block, 512 vectors of eight, even signs, odd scales of four bits."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.codebook_type import codebook_rows, codebook_type


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    rows, signs = codebook_rows(blocks.levels, "IQ2_XS")
    words = rows | (join(signs, 1, 1) & 127).to(torch.int32) << 9
    low_high = torch.stack([words & 255, words >> 8], dim=2).flatten(1)
    return [*blocks.factors, low_high, join(blocks.scales >> 1, 4, 1)]


TYPE = codebook_type("IQ2_XS", encode, even_signs=True, unit=0.125)
