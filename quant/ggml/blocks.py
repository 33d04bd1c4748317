"""Packs levels and multiples into the bytes of ggml blocks (ggml-common.h), the inverse of `checkpoint.gguf.blocks`."""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, SolvedBlocks, SolvedRows


def encode_rows(solved: SolvedRows, kind: BlockType) -> Tensor:
    """Return the blocks uint8 [N, blocks * nbytes] of solved rows."""
    rows = solved.levels.shape[1]
    blocks = rows * solved.factors.shape[1]
    levels, scales, minima = (
        None if values is None else values.T.reshape(blocks, -1).to(torch.int16)
        for values in (solved.levels, solved.multiples, solved.minima)
    )
    assert levels is not None and scales is not None
    factors = [factor.T.flatten().to(torch.float16).view(torch.uint8).view(-1, 2) for factor in solved.factors]
    parts = kind.encode(SolvedBlocks(levels, scales, minima, factors))
    return torch.cat([part.to(torch.uint8) for part in parts], 1).view(rows, -1)


def join(values: Tensor, bits: int, run: int) -> Tensor:
    """Pack values below 2 ** bits [n, m]: `8 / bits * run` values fill `run` bytes, the first run in the low bits."""
    # ggml joins values `run` apart in one byte, not neighbours.
    parts = values.view(len(values), -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.int16).view(1, 1, -1, 1)
    return (parts.to(torch.int16) << shifts).sum(2).flatten(1).to(torch.uint8)


def six_bits(blocks: SolvedBlocks) -> Tensor:
    """Return the 12 bytes of eight scales and eight minima of six bits."""
    # Scales and minima 0 to 3 are the low six bits of bytes 0 to 7, whose top two bits hold the high bits of 4 to 7;
    # bytes 8 to 11 hold the low four bits of these.
    scales, minima = blocks.scales, blocks.minima
    assert minima is not None
    low = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return torch.cat([*low, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], 1).to(torch.uint8)


def signs_with_scale(signs: Tensor, scales: Tensor) -> Tensor:
    """Return 32-bit words, uint8 [n, 32], with seven of every eight signs [n, 256] and a scale of four bits [n, 8]."""
    sevens = (join(signs, 1, 1) & 127).to(torch.int64).view(len(signs), 8, 4)
    words = (sevens << torch.arange(0, 28, 7)).sum(2) | scales.to(torch.int64) << 28
    return torch.stack([words >> shift & 255 for shift in range(0, 32, 8)], 2).flatten(1).to(torch.uint8)
