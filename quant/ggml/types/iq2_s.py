"""IQ2_S: 16 groups of 16 in a super-block, 1,024 vectors of eight, free signs, odd scales of four bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.codebook_type import codebook_rows, codebook_type


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    rows, signs = codebook_rows(blocks.levels, "IQ2_S")
    scales = join(blocks.scales >> 1, 4, 1)
    return [*blocks.factors, rows & 255, join(signs, 1, 1), join(rows >> 8, 2, 1), scales]


TYPE = codebook_type("IQ2_S", encode, even_signs=False, unit=0.125)
