"""The packed layout and its reference: how quantized weights lie in the file, and what they mean.

A row of K codes u in [0, 2^bits) is one contiguous stream of bits, least significant first, in little-endian 32-bit
words: code i takes bits [i*bits, i*bits + bits) of the row, so 3-bit codes cross word borders (32 codes are exactly 3
words). The weight is w = value(u) * s + offset: value(u) is u - 2^(bits-1), or the entry u of a table; s may be
negative. Every layout of other people's checkpoints becomes this without a change of its weights. Ours is described in
docs/format.md.

Everything here is plain torch on any device, and slow: kernels are measured against it. It does not know which runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.quantization.codes import code_values
from mycli.runtime.quantization.scheme import Packing

_BLOCK = 32  # codes; always a whole number of words
PART = 1 << 22  # weights that `dequantize_rows` makes at a time


@dataclass(frozen=True)
class PackedWeight:
    """Quantized weights as on disk; N output rows may stack several linears that share an input and a packing.

    packed: int32 [N, ceil(K * bits / 32)]; scales: [N, K / group_size] or [N, 1], of any floating-point dtype; offsets:
    fp32 of the scales' shape where `packing.offsets`, else None; inputs: int32 [K] where `packing.permuted`, else None:
    column j multiplies input inputs[j]; factors: fp16 [N, K / SUPER_BLOCK, 1 or 2] where
    `packing.super_blocks`, else None: what whole numbers are multiplied by to give scales (see `super_blocks`).
    """

    packed: Tensor
    scales: Tensor
    packing: Packing
    in_features: int
    offsets: Tensor | None = None
    inputs: Tensor | None = None
    factors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        tensors = (self.packed, self.scales, self.offsets, self.inputs, self.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.shape[0]


class Matmul(Protocol):
    """A weight in the layout that one kernel likes. It replaces the tensors it was made from: no second copy stays."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K], contiguous, to [rows, N] in the dtype of x."""
        ...

    def dequantize(self) -> Tensor:
        """The weight [N, K], for tests and dense products."""
        ...


class Kernel(Protocol):
    """One way of multiplying by packed weights."""

    @property
    def name(self) -> str:
        """As `doctor` prints it."""
        ...

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """None where this kernel takes the product of `dtype` activations; otherwise the reason why not."""
        ...

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Rearrange `weight` for activations of `dtype`; called only where `decline` returned None."""
        ...


def _low_half(bits: int, width: int) -> int:
    """A mask of the first `width` of every 2 * `width` codes of `bits` bits, `width` codes in `width` bytes."""
    return sum(((1 << width * bits) - 1) << start for start in range(0, 64, 16 * width))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K], each below 2^bits, to int32 [N, ceil(K * bits / 32)]."""
    rows, columns = codes.shape
    padded = -columns % _BLOCK
    if 8 % bits == 0:  # a byte holds whole codes, which is several times faster
        parts = torch.nn.functional.pad(codes, (0, padded)).view(rows, -1, 8 // bits)
        packed = parts[:, :, 0].clone()
        for index in range(1, 8 // bits):
            packed |= parts[:, :, index] << index * bits
        return packed.view(torch.int32)[:, : (columns * bits + 31) // 32].contiguous()
    # Eight codes at a time, a byte each in 64 bits, move together by pairs, by fours and by eights: `bits` bytes.
    eights = torch.nn.functional.pad(codes, (0, padded)).view(torch.int64)
    for width in (1, 2, 4):
        low = _low_half(bits, width)
        eights = (eights >> 8 * width & low) << width * bits | eights & low
    stored = eights.view(torch.uint8).view(rows, -1, 8)[:, :, :bits].reshape(rows, -1)
    return stored.view(torch.int32)[:, : (columns * bits + 31) // 32].contiguous()


def unpack(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """The inverse of `pack`: int32 [N, words] to uint8 [N, in_features]."""
    rows, words = packed.shape
    if 8 % bits == 0:
        stored = packed.contiguous().view(torch.uint8)
        parts = [stored >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).view(rows, -1)[:, :in_features].contiguous()
    blocks = -(-in_features // _BLOCK)
    padded = torch.nn.functional.pad(packed, (0, blocks * bits - words)).view(torch.uint8).view(rows, -1, bits)
    eights = torch.nn.functional.pad(padded, (0, 8 - bits)).view(torch.int64).squeeze(-1)
    for width in (4, 2, 1):
        low = _low_half(bits, width)
        eights = (eights >> width * bits & low) << 8 * width | eights & low
    return eights.view(torch.uint8)[:, :in_features].contiguous()


def dequantize(weight: PackedWeight) -> Tensor:
    """The weights [N, K] in the dtype of the scales, columns in the order of the inputs.

    Symmetric integers: the product, rounded in that dtype. With offsets or a table: in fp32, rounded once.
    """
    packing, k, dtype = weight.packing, weight.in_features, weight.scales.dtype
    exact = packing.codes == "int" and weight.offsets is None
    scales = weight.scales if exact else weight.scales.float()
    values = code_values(unpack(weight.packed, packing.bits, k), packing, scales.dtype)
    groups = packing.groups(k)
    values = values.view(-1, groups, k // groups) * scales.unsqueeze(-1)
    if weight.offsets is not None:
        values = values + weight.offsets.unsqueeze(-1)
    values = values.view(-1, k).to(dtype)
    if weight.inputs is None:
        return values
    ordered = torch.empty_like(values)
    ordered[:, weight.inputs.long()] = values
    return ordered


def dequantize_rows(weight: PackedWeight) -> Iterator[tuple[slice, Tensor]]:
    """`dequantize` in pieces of about `PART` weights: which rows, and their values."""
    step = max(1, PART // weight.in_features)
    for start in range(0, weight.out_features, step):
        rows = slice(start, start + step)
        offsets = None if weight.offsets is None else weight.offsets[rows]
        part = replace(weight, packed=weight.packed[rows], scales=weight.scales[rows], offsets=offsets, factors=None)
        yield rows, dequantize(part)
