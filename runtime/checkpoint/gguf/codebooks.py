"""Decodes ggml's codebook (IQ*), ternary (TQ*) and 4-bit float types.

Entries of every codebook are small integers, so each type is exactly int8 levels with a scale per 16, 32 or 256.
`codebooks.json` has the rows of ggml-common.h, two or four bits per entry. `READERS` map blocks, uint8 [n, bytes], to
levels int8 [n, block] and scales fp32 [n, groups].
"""

import base64
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1 times 2, so that levels are integers


@lru_cache
def codebook(name: str) -> Tensor:
    """Return the rows of a codebook, int8 [rows, 4 or 8]; shared, so do not write to it."""
    entry = json.loads(Path(__file__).with_name("codebooks.json").read_text("ascii"))[name]
    data = torch.frombuffer(bytearray(base64.b64decode(entry["rows"])), dtype=torch.uint8)
    bits = entry["bits"]
    indices = (data.unsqueeze(1) >> torch.arange(0, 8, bits, dtype=torch.uint8)) & ((1 << bits) - 1)
    return torch.tensor(entry["values"], dtype=torch.int8)[indices.flatten().long()].view(-1, entry["columns"])


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    bits = 8 * dtype.itemsize
    # A copy in any case: the bytes of a single block are contiguous, but need not begin at a multiple of a word.
    return data.clone(memory_format=torch.contiguous_format).view(dtype).long() & ((1 << bits) - 1)


def _shifted(words: Tensor, shifts: range, mask: int) -> Tensor:
    return (words.unsqueeze(-1) >> torch.tensor(list(shifts))).reshape(len(words), -1) & mask


def _nibbles(data: Tensor) -> Tensor:
    return _shifted(data.long(), range(0, 8, 4), 15)


def _halves(data: Tensor) -> Tensor:
    return torch.cat([data & 15, data >> 4], dim=-1).long()


def _signs(bits: Tensor) -> Tensor:
    # [n, m] to [n, 8 m]: a set bit is minus, the lowest bit first.
    return (1 - 2 * _shifted(bits, range(8), 1)).to(torch.int8)


def _even_signs(bits: Tensor) -> Tensor:
    # Seven bits are stored for eight signs: the last one makes the number of minus signs even.
    parity = _shifted(bits, range(7), 1).view(*bits.shape, 7).sum(-1) & 1
    return _signs(bits | parity << 7)


def _rows(name: str, indices: Tensor) -> Tensor:
    return codebook(name)[indices].reshape(len(indices), -1)


def _table(values: tuple[int, ...], indices: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[indices]


def _iq2_xxs(x: Tensor) -> tuple[Tensor, Tensor]:
    words = x[:, 2:].reshape(-1, 8, 8)
    rest = _words(words[:, :, 4:].reshape(len(x), -1), torch.int32)
    scales = _half(x[:, :2]) * (0.5 + (rest >> 28).float()) * 0.25
    signs = _even_signs(_shifted(rest, range(0, 28, 7), 127))
    return _rows("IQ2_XXS", words[:, :, :4].reshape(len(x), -1).long()) * signs, scales


def _iq2_xs(x: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(x[:, 2:66], torch.int16)
    scales = _half(x[:, :2]) * (0.5 + _nibbles(x[:, 66:])) * 0.25
    return _rows("IQ2_XS", words & 511) * _even_signs(words >> 9), scales


def _iq2_s(x: Tensor) -> tuple[Tensor, Tensor]:
    high = _shifted(x[:, 66:74].long(), range(0, 8, 2), 3)
    scales = _half(x[:, :2]) * (0.5 + _nibbles(x[:, 74:])) * 0.25
    return _rows("IQ2_S", x[:, 2:34].long() | high << 8) * _signs(x[:, 34:66].long()), scales


def _iq3_xxs(x: Tensor) -> tuple[Tensor, Tensor]:
    rest = _words(x[:, 66:], torch.int32)
    scales = _half(x[:, :2]) * (0.5 + (rest >> 28).float()) * 0.5
    return _rows("IQ3_XXS", x[:, 2:66].long()) * _even_signs(_shifted(rest, range(0, 28, 7), 127)), scales


def _iq3_s(x: Tensor) -> tuple[Tensor, Tensor]:
    high = _shifted(x[:, 66:74].long(), range(8), 1)
    scales = _half(x[:, :2]) * (1 + 2 * _nibbles(x[:, 106:]))
    return _rows("IQ3_S", x[:, 2:66].long() | high << 8) * _signs(x[:, 74:106].long()), scales


def _iq1_s(x: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(x[:, 34:], torch.int16)
    scales = _half(x[:, :2]) * (2 * (words >> 12 & 7) + 1)
    rows = _rows("IQ1_S", x[:, 2:34].long() | _shifted(words, range(0, 12, 3), 7) << 8)
    shift = (1 - 2 * (words >> 15)).to(torch.int8)  # levels move by an eighth, so the unit is an eighth
    return (8 * rows.view(-1, 8, 32) + shift.unsqueeze(-1)).view(len(x), -1), scales / 8


def _iq1_m(x: Tensor) -> tuple[Tensor, Tensor]:
    words = _words(x[:, 48:], torch.int16)
    half = (words >> 12) << torch.tensor([0, 4, 8, 12])  # the fp16 scale of the block, 4 bits in each word
    total = half.sum(1, keepdim=True)
    total = torch.where(total > 32767, total - 65536, total).to(torch.int16).view(torch.float16).float()
    scales = total * (2 * _shifted(words, range(0, 12, 3), 7) + 1)
    high = _nibbles(x[:, 32:48])
    rows = _rows("IQ1_S", x[:, :32].long() | (high & 7) << 8)
    shift = (1 - 2 * (high >> 3)).to(torch.int8)
    return (8 * rows.view(-1, 32, 8) + shift.unsqueeze(-1)).view(len(x), -1), scales / 8


def _tq1_0(x: Tensor) -> tuple[Tensor, Tensor]:
    # Five ternary digits per byte, as a fraction of 256: times three, the digit is the overflow.
    parts = []
    for start, end, run, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = torch.tensor([3**index for index in range(digits)]).view(1, 1, -1, 1)
        parts.append((x[:, start:end].long().view(len(x), -1, 1, run) * powers & 255).reshape(len(x), -1))
    return ((torch.cat(parts, dim=1) * 3 >> 8) - 1).to(torch.int8), _half(x[:, 52:])


def _tq2_0(x: Tensor) -> tuple[Tensor, Tensor]:
    levels = (x[:, :64].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)) & 3
    return levels.to(torch.int8).view(len(x), -1) - 1, _half(x[:, 64:])


def _mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    exponent = x[:, :1].int()  # half of 2^(e - 127): levels are doubled
    bits = torch.where(exponent < 2, torch.tensor(0x00200000, dtype=torch.int32) << exponent, (exponent - 1) << 23)
    return _table(FP4, _halves(x[:, 1:])), bits.view(torch.float32)


def _nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x[:, :4].int()
    exponent, mantissa = scale >> 3 & 15, (scale & 7).float()
    values = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * torch.exp2(exponent.float() - 7))
    values = torch.where((scale == 0) | (scale == 0x7F), 0.0, values * 0.5)
    return _table(FP4, _halves(x[:, 4:].reshape(-1, 4, 8))).view(len(x), -1), values


READERS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
