"""IQ2_S: 16 groups of 16 in a super-block, 1,024 vectors of eight, free signs, odd scales of four bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import codebook_rows, factors_by_block, join, levels_by_block, multiples_by_block, rows_of
from mycli.quant.ggml.levels import Codebook
from mycli.runtime.checkpoint.gguf.codebooks import codebook


def encode(solved: SolvedRows) -> Tensor:
    scales = multiples_by_block(solved.multiples, solved.factors.shape[1]) >> 1
    rows, signs = codebook_rows(levels_by_block(solved, 256), codebook("IQ2_S"))
    parts = [*factors_by_block(solved), rows & 255, join(signs, 1, 1), join(rows >> 8, 2, 1), join(scales, 4, 1)]
    return rows_of(parts, solved.levels.shape[1])


TYPE = BlockType(
    "IQ2_S",
    lambda: Codebook(codebook("IQ2_S"), even_signs=False),
    encode,
    Multiples(1, 16, 2),
    unit=0.125,
)
