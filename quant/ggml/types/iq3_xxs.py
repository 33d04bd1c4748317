"""IQ3_XXS: 8 groups of 32 in a super-block, pairs of 256 vectors of four, even signs, odd scales of four bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import SolvedBlocks
from mycli.quant.ggml.blocks import signs_with_scale
from mycli.quant.ggml.codebook_type import codebook_rows, codebook_type


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    rows, signs = codebook_rows(blocks.levels, "IQ3_XXS")
    return [*blocks.factors, rows, signs_with_scale(signs, blocks.scales >> 1)]


TYPE = codebook_type("IQ3_XXS", encode, even_signs=True, unit=0.25)
