"""Decodes ggml's codebook (IQ*), ternary (TQ*) and 4-bit float types.

Entries of a codebook are few different integers, so a weight is a code of one of the tables of `INTEGER_TABLES` times a
scale per 16 or 32. `codebooks.json` has the rows of ggml-common.h, two or four bits per entry.

`READERS` map blocks, uint8 [n, bytes], to levels or codes, int8 [n, block], and scales fp32 [n, groups];
`NESTED_READERS` to codes, integer scales [n, groups], and their factors, fp16 [n, 1].
"""

import base64
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from mycli.runtime.quantization.scheme import INTEGER_TABLES, Codes

FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice E2M1, as ggml has it
Nested = tuple[Tensor, Tensor, Tensor]


@lru_cache
def codebook(name: str) -> Tensor:
    """Return the rows of a codebook, int8 [rows, 4 or 8]; shared, so do not write to it."""
    entry = json.loads(Path(__file__).with_name("codebooks.json").read_text("ascii"))[name]
    data = torch.frombuffer(bytearray(base64.b64decode(entry["rows"])), dtype=torch.uint8)
    bits = entry["bits"]
    indices = (data.unsqueeze(1) >> torch.arange(0, 8, bits, dtype=torch.uint8)) & ((1 << bits) - 1)
    return torch.tensor(entry["values"], dtype=torch.int8)[indices.flatten().long()].view(-1, entry["columns"])


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    bits = 8 * dtype.itemsize
    # A copy in any case: the bytes of a single block are contiguous, but need not begin at a multiple of a word.
    return data.clone(memory_format=torch.contiguous_format).view(dtype).long() & ((1 << bits) - 1)


def _shifted(words: Tensor, shifts: range, mask: int) -> Tensor:
    return (words.unsqueeze(-1) >> torch.tensor(list(shifts))).reshape(len(words), -1) & mask


def _nibbles(data: Tensor) -> Tensor:
    return _shifted(data.long(), range(0, 8, 4), 15)


def _halves(data: Tensor) -> Tensor:
    return torch.cat([data & 15, data >> 4], dim=-1)


def _eights(table: Tensor, indices: Tensor) -> Tensor:
    # Rows of a table int8 [rows, 4 or 8], as one word each: [n, m] to int8 [n, columns * m].
    word = torch.int32 if table.shape[1] == 4 else torch.int64
    return table.view(word).flatten()[indices].view(torch.int8)


@lru_cache
def _sign_masks() -> tuple[Tensor, Tensor]:
    # -1 where a bit of a byte is set, the lowest first, int8 [256, 8]: the complement of a code has the negative value.
    # Of seven bits, int8 [128, 8]: the last one makes the number of minus signs even.
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    even = bits[:128].clone()
    even[:, 7] = even.sum(1) & 1
    return -bits.to(torch.int8), -even.to(torch.int8)


@lru_cache
def _codes(name: str, codes: Codes) -> Tensor:
    # The rows of a codebook as codes of an integer table, int8 [rows, columns].
    table = torch.tensor(INTEGER_TABLES[codes], dtype=torch.int8)
    return torch.searchsorted(table, codebook(name), right=True).to(torch.int8) - 1


def _signed(name: str, codes: Codes, indices: Tensor, signs: Tensor) -> Tensor:
    return (_eights(_codes(name, codes), indices) ^ signs) & (len(INTEGER_TABLES[codes]) - 1)


def _iq2_xxs(x: Tensor) -> Nested:
    words = x[:, 2:].reshape(-1, 8, 8)
    rest = _words(words[:, :, 4:].reshape(len(x), -1), torch.int32)
    signs = _eights(_sign_masks()[1], _shifted(rest, range(0, 28, 7), 127))
    codes = _signed("IQ2_XXS", "iq2", words[:, :, :4].reshape(len(x), -1).long(), signs)
    return codes, 2 * (rest >> 28) + 1, _half(x[:, :2])


def _iq2_xs(x: Tensor) -> Nested:
    words = _words(x[:, 2:66], torch.int16)
    codes = _signed("IQ2_XS", "iq2", words & 511, _eights(_sign_masks()[1], words >> 9))
    return codes, 2 * _nibbles(x[:, 66:]) + 1, _half(x[:, :2])


def _iq2_s(x: Tensor) -> Nested:
    high = _shifted(x[:, 66:74].long(), range(0, 8, 2), 3)
    signs = _eights(_sign_masks()[0], x[:, 34:66].long())
    codes = _signed("IQ2_S", "iq2", x[:, 2:34].long() | high << 8, signs)
    return codes, 2 * _nibbles(x[:, 74:]) + 1, _half(x[:, :2])


def _iq3_xxs(x: Tensor) -> Nested:
    rest = _words(x[:, 66:], torch.int32)
    signs = _eights(_sign_masks()[1], _shifted(rest, range(0, 28, 7), 127))
    return _signed("IQ3_XXS", "iq3_xxs", x[:, 2:66].long(), signs), 2 * (rest >> 28) + 1, _half(x[:, :2])


def _iq3_s(x: Tensor) -> Nested:
    high = _shifted(x[:, 66:74].long(), range(8), 1)
    codes = _signed("IQ3_S", "iq3_s", x[:, 2:66].long() | high << 8, _eights(_sign_masks()[0], x[:, 74:106].long()))
    return codes, 2 * _nibbles(x[:, 106:]) + 1, _half(x[:, :2])


def _one_bit(indices: Tensor, minus: Tensor, run: int) -> Tensor:
    # Levels -1, 0 and 1 move by an eighth, down where `minus` is 1, [n, runs]: 8 * level +- 1 is in the table "iq1".
    rows = _eights(codebook("IQ1_S"), indices).view(len(indices), -1, run)
    return (2 * rows + (4 - minus).to(torch.int8).unsqueeze(-1)).view(len(indices), -1)


def _iq1_s(x: Tensor) -> Nested:
    words = _words(x[:, 34:], torch.int16)
    indices = x[:, 2:34].long() | _shifted(words, range(0, 12, 3), 7) << 8
    return _one_bit(indices, words >> 15, 32), 2 * (words >> 12 & 7) + 1, _half(x[:, :2])


def _iq1_m(x: Tensor) -> Nested:
    words = _words(x[:, 48:], torch.int16)
    half = (words >> 12) << torch.tensor([0, 4, 8, 12])  # the fp16 scale of the block, 4 bits in each word
    total = half.sum(1, keepdim=True)
    factors = torch.where(total > 32767, total - 65536, total).to(torch.int16).view(torch.float16)
    high = _nibbles(x[:, 32:48])
    codes = _one_bit(x[:, :32].long() | (high & 7) << 8, high >> 3, 8)
    return codes, 2 * _shifted(words, range(0, 12, 3), 7) + 1, factors


def _iq4_xs(x: Tensor) -> Nested:
    high = _shifted(_words(x[:, 2:4], torch.int16), range(0, 16, 2), 3)
    codes = _halves(x[:, 8:].reshape(-1, 8, 16)).view(len(x), -1)
    return codes.view(torch.int8), (_nibbles(x[:, 4:8]) | high << 4) - 32, _half(x[:, :2])


def _iq4_nl(x: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(x[:, 2:]).view(torch.int8), _half(x[:, :2]).float()


def _tq1_0(x: Tensor) -> tuple[Tensor, Tensor]:
    # Five ternary digits per byte, as a fraction of 256: times three, the digit is the overflow.
    parts = []
    for start, end, run, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = torch.tensor([3**index for index in range(digits)]).view(1, 1, -1, 1)
        parts.append((x[:, start:end].long().view(len(x), -1, 1, run) * powers & 255).reshape(len(x), -1))
    return ((torch.cat(parts, dim=1) * 3 >> 8) - 1).to(torch.int8), _half(x[:, 52:]).float()


def _tq2_0(x: Tensor) -> tuple[Tensor, Tensor]:
    levels = (x[:, :64].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)) & 3
    return levels.to(torch.int8).view(len(x), -1) - 1, _half(x[:, 64:]).float()


def _mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    exponent = x[:, :1].int()  # half of 2^(e - 127), since the values of `FP4` are doubled
    bits = torch.where(exponent < 2, torch.tensor(0x00200000, dtype=torch.int32) << exponent, (exponent - 1) << 23)
    return _halves(x[:, 1:]).view(torch.int8), bits.view(torch.float32)


def _nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x[:, :4].int()
    exponent, mantissa = scale >> 3 & 15, (scale & 7).float()
    values = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * torch.exp2(exponent.float() - 7))
    values = torch.where((scale == 0) | (scale == 0x7F), 0.0, values * 0.5)
    return _halves(x[:, 4:].reshape(-1, 4, 8)).view(len(x), -1).view(torch.int8), values


READERS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "IQ4_NL": _iq4_nl,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
NESTED_READERS: Mapping[str, Callable[[Tensor], Nested]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ4_XS": _iq4_xs,
}
