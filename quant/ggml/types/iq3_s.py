"""IQ3_S: 8 groups of 32 in a super-block, pairs of 512 vectors of four, free signs, odd scales of four bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.codebook_type import codebook_rows, codebook_type


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    rows, signs = codebook_rows(blocks.levels, "IQ3_S")
    scales = join(blocks.scales >> 1, 4, 1)
    return [*blocks.factors, rows & 255, join(rows >> 8, 1, 1), join(signs, 1, 1), scales]


TYPE = codebook_type("IQ3_S", encode, even_signs=False, unit=1.0)
