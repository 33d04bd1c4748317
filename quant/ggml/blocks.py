"""Packs levels and multiples into the bytes of ggml blocks (ggml-common.h), the inverse of `checkpoint.gguf.blocks`."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import SolvedRows


def levels_by_block(solved: SolvedRows, size: int) -> Tensor:
    """Return levels int16 [N * blocks, size]."""
    return solved.levels.T.reshape(-1, size).to(torch.int16)


def multiples_by_block(multiples: Tensor, blocks: int) -> Tensor:
    """Return multiples int16 [N * blocks, groups]."""
    return multiples.T.reshape(multiples.shape[1] * blocks, -1).to(torch.int16)


def factors_by_block(solved: SolvedRows) -> list[Tensor]:
    """Return the bytes uint8 [N * blocks, 2] of each factor."""
    return [
        factor.T.flatten().to(torch.float16).contiguous().view(torch.uint8).view(-1, 2) for factor in solved.factors
    ]


def rows_of(parts: list[Tensor], rows: int) -> Tensor:
    """Return blocks uint8 [N, bytes], joined from parts [N * blocks, bytes]."""
    return torch.cat([part.to(torch.uint8) for part in parts], 1).view(rows, -1)


def join(values: Tensor, bits: int, run: int) -> Tensor:
    """Pack values below 2 ** bits [n, m]: `8 / bits * run` values fill `run` bytes, the first run in the low bits."""
    # ggml joins values `run` apart in one byte, not neighbours.
    parts = values.view(len(values), -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.int16).view(1, 1, -1, 1)
    return (parts.to(torch.int16) << shifts).sum(2).flatten(1).to(torch.uint8)


def six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Return the 12 bytes of eight scales and eight minima of six bits [n, 8]."""
    # Scales and minima 0 to 3 are the low six bits of bytes 0 to 7, whose top two bits hold the high bits of 4 to 7;
    # bytes 8 to 11 hold the low four bits of these.
    low = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return torch.cat([*low, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], 1).to(torch.uint8)


def codebook_rows(levels: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codebook rows int32 [n, vectors] with the magnitudes of levels [n, size], and sign bits [n, size]."""
    # Rows are found by their magnitudes as digits of one number: a sorted search, where comparing all rows would take
    # `len(codebook)` times the memory of the levels.
    width, values = codebook.shape[1], torch.unique(codebook).to(torch.int16)
    powers = len(values) ** torch.arange(width)
    keys, order = (torch.searchsorted(values, codebook.to(torch.int16)) * powers).sum(1).sort()
    digits = torch.searchsorted(values, levels.abs().contiguous()).view(len(levels), -1, width)
    rows = order[torch.searchsorted(keys, (digits * powers).sum(2))]
    return rows.to(torch.int32), (levels < 0).to(torch.int16)


def signs_with_scale(signs: Tensor, scales: Tensor) -> Tensor:
    """Return 32-bit words, uint8 [n, 32], with seven of every eight signs [n, 256] and a scale of four bits [n, 8]."""
    sevens = (join(signs, 1, 1) & 127).to(torch.int64).view(len(signs), 8, 4)
    words = (sevens << torch.arange(0, 28, 7)).sum(2) | scales.to(torch.int64) << 28
    return torch.stack([words >> shift & 255 for shift in range(0, 32, 8)], 2).flatten(1).to(torch.uint8)
