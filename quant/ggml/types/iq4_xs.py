"""IQ4_XS: 8 groups of 32 in a super-block, levels of the table of IQ4_NL, signed scales of six bits."""

from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedBlocks
from mycli.quant.ggml.blocks import join
from mycli.quant.ggml.levels import Table
from mycli.quant.ggml.types.iq4_nl import TABLE, indices


def encode(blocks: SolvedBlocks) -> list[Tensor]:
    scales = blocks.scales + 32
    levels = join(indices(blocks.levels), 4, 16)
    return [*blocks.factors, join(scales >> 4, 2, 1), join(scales & 15, 4, 1), levels]


TYPE = BlockType("IQ4_XS", lambda: Table(TABLE), encode, Multiples(-32, 64))
