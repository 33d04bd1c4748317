"""What the blocks of ggml's quantized types hold: levels, scales and minima, exactly.

The layouts are those of ggml's ggml-common.h: K-quants hold a scale of scales for 256 values, codebook types rows of a
table (`codebooks`). All become the same three things, from which the weights follow in the order of operations of
ggml's own reference, so that they are equal bit for bit. Plain torch, slow; done once, at load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.checkpoint.gguf import codebooks
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME, GgmlType


@dataclass(frozen=True)
class Groups:
    """weight = scale * level + minimum. levels: int8 [n, block]; scales, minima: fp32 [n, block / group].

    factors: of super-blocks, fp16 [n, 1 or 2], what all scales, and all minima, are whole numbers of.
    """

    levels: Tensor
    scales: Tensor
    minima: Tensor | None = None
    factors: Tensor | None = None

    def values(self) -> Tensor:
        """The weights, fp32 [n, block]."""
        blocks, groups = self.scales.shape
        weights = self.levels.view(blocks, groups, -1) * self.scales.unsqueeze(-1)
        if self.minima is not None:
            weights = weights + self.minima.unsqueeze(-1)
        return weights.view(blocks, -1)


def _half(data: Tensor) -> Tensor:
    """uint8 [n, 2] as the float16 that it is, in fp32 [n, 1]."""
    return _halves(data).float()


def _halves(data: Tensor) -> Tensor:
    """uint8 [n, 2 * k] as float16 [n, k]."""
    return data.contiguous().view(torch.float16)


def _split(data: Tensor, shifts: tuple[int, ...], run: int = 32) -> Tensor:
    """uint8 [n, bytes]: of each run of bytes first all at the first shift, then all at the second: [n, values]."""
    shift = torch.tensor(shifts, dtype=torch.uint8).view(1, 1, -1, 1)
    return (data.reshape(len(data), -1, 1, run) >> shift).reshape(len(data), -1)


def _nibbles(data: Tensor, run: int = 32) -> Tensor:
    return _split(data, (0, 4), run) & 15


def _bits(data: Tensor) -> Tensor:
    """uint8 [n, bytes] to its bits, the lowest of each byte first: [n, 8 * bytes]."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).reshape(len(data), -1) & 1


def _q4_0(x: Tensor) -> Groups:
    return Groups(_nibbles(x[:, 2:], 16).to(torch.int8) - 8, _half(x[:, :2]))


def _q4_1(x: Tensor) -> Groups:
    return Groups(_nibbles(x[:, 4:], 16).to(torch.int8), _half(x[:, :2]), _half(x[:, 2:4]))


def _q5_0(x: Tensor) -> Groups:
    levels = _nibbles(x[:, 6:], 16) | _bits(x[:, 2:6]) << 4
    return Groups(levels.to(torch.int8) - 16, _half(x[:, :2]))


def _q5_1(x: Tensor) -> Groups:
    levels = _nibbles(x[:, 8:], 16) | _bits(x[:, 4:8]) << 4
    return Groups(levels.to(torch.int8), _half(x[:, :2]), _half(x[:, 2:4]))


def _q8_0(x: Tensor) -> Groups:
    return Groups(x[:, 2:].contiguous().view(torch.int8), _half(x[:, :2]))


def _super_block(levels: Tensor, scales: Tensor, factors: Tensor, minima: Tensor | None = None) -> Groups:
    """Levels, and whole numbers of the factors; minima are subtracted."""
    each = factors.float()
    subtracted = None if minima is None else -(each[:, 1:] * minima)
    return Groups(levels.to(torch.int8), each[:, :1] * scales, subtracted, factors)


def _q2_k(x: Tensor) -> Groups:
    scales = x[:, :16]
    levels = _split(x[:, 16:80], (0, 2, 4, 6)) & 3
    return _super_block(levels, scales & 15, _halves(x[:, 80:84]), scales >> 4)


def _q3_k(x: Tensor) -> Groups:
    low, high = _split(x[:, 96:104], (0, 4), 8) & 15, _split(x[:, 104:108], (0, 2, 4, 6), 4) & 3
    scales = (low | high << 4).to(torch.int8) - 32
    levels = (_split(x[:, 32:96], (0, 2, 4, 6)) & 3) | (_split(x[:, :32], tuple(range(8))) & 1) << 2
    return _super_block(levels.to(torch.int8) - 4, scales, _halves(x[:, 108:110]))


def _scales_and_minima(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K: eight scales and eight minima of 6 bits, [n, 8] each."""
    first, second, rest = x[:, :4], x[:, 4:8], x[:, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=1)
    return scales, minima


def _q4_k(x: Tensor) -> Groups:
    scales, minima = _scales_and_minima(x[:, 4:16])
    return _super_block(_nibbles(x[:, 16:]), scales, _halves(x[:, :4]), minima)


def _q5_k(x: Tensor) -> Groups:
    scales, minima = _scales_and_minima(x[:, 4:16])
    levels = _nibbles(x[:, 48:]) | (_split(x[:, 16:48], tuple(range(8))) & 1) << 4
    return _super_block(levels, scales, _halves(x[:, :4]), minima)


def _q6_k(x: Tensor) -> Groups:
    levels = _nibbles(x[:, :128], 64) | (_split(x[:, 128:192], (0, 2, 4, 6)) & 3) << 4
    scales = x[:, 192:208].contiguous().view(torch.int8)
    return _super_block(levels.to(torch.int8) - 32, scales, _halves(x[:, 208:210]))


_READERS: Mapping[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def read_groups(data: Tensor, kind: GgmlType) -> Groups:
    """The groups of `data` uint8 [n, kind.nbytes]."""
    if kind.name in _READERS:
        return _READERS[kind.name](data)
    levels, scales = codebooks.READERS[kind.name](data)
    return Groups(levels, scales)


def dequantize_blocks(data: Tensor, name: str) -> Tensor:
    """The weights of `data` uint8 [rows, bytes of a row] of the ggml type `name`: fp32 [rows, columns]."""
    kind = TYPES_BY_NAME[name]
    if kind.dtype is not None:
        return data.contiguous().view(getattr(torch, kind.dtype)).float()
    return read_groups(data.reshape(-1, kind.nbytes), kind).values().view(len(data), -1)
