"""Declares the ggml types whose levels are vectors of a codebook (IQ2, IQ3)."""

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedBlocks
from mycli.quant.ggml.levels import Codebook
from mycli.runtime.checkpoint.gguf.codebooks import codebook


def codebook_type(
    name: str, encode: Callable[[SolvedBlocks], list[Tensor]], *, even_signs: bool, unit: float
) -> BlockType:
    """Return a type with the codebook of its name and odd scales of four bits."""
    return BlockType(name, lambda: Codebook(codebook(name), even_signs), encode, Multiples(1, 16, 2), unit=unit)


def codebook_rows(levels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the rows int32 [n, vectors] with the magnitudes of levels [n, size] in a codebook, and signs [n, size]."""
    table = codebook(name)
    # Rows are found by their magnitudes as digits of one number: a sorted search, where comparing all rows would take
    # `len(table)` times the memory of the levels.
    width, values = table.shape[1], torch.unique(table).to(torch.int16)
    powers = len(values) ** torch.arange(width)
    keys, order = (torch.searchsorted(values, table.to(torch.int16)) * powers).sum(1).sort()
    digits = torch.searchsorted(values, levels.abs().contiguous()).view(len(levels), -1, width)
    rows = order[torch.searchsorted(keys, (digits * powers).sum(2))]
    return rows.to(torch.int32), (levels < 0).to(torch.int16)
