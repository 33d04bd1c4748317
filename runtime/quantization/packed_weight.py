"""The packed layout of quantized weights, and its conversion to values in plain torch: the reference of kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.quantization.codes import code_table, code_values
from mycli.runtime.quantization.scheme import Packing

# A row of K codes u in [0, 2^bits) is one contiguous stream of bits, least significant first, in little-endian 32-bit
# words: code i has bits [i*bits, i*bits + bits) of the row, so 3-bit codes cross word borders (32 codes are exactly 3
# words). The weight is w = value(u) * s + offset: value(u) is u - 2^(bits-1), or entry u of a table; s may be negative.
# The layouts of other programs are converted to this one without changing a weight; see docs/format.md.
_BLOCK = 32  # codes, which are a whole number of words at any width
PART = 1 << 22  # weights that `dequantize_rows` decodes at a time


@dataclass(frozen=True)
class PackedWeight:
    """Quantized weights as stored; N output rows may stack several linears that share an input and a packing."""

    packed: Tensor  # int32 [N, ceil(K * bits / 32)]
    scales: Tensor  # [N, K / group_size] or [N, 1], of any floating-point dtype
    packing: Packing
    in_features: int  # K
    offsets: Tensor | None = None  # with `packing.offsets`: fp32 of the scales' shape
    inputs: Tensor | None = None  # with `packing.permuted`: int32 [K], column j multiplies input inputs[j]
    # With super-blocks fp16 [N, K / SUPER_BLOCK, 1 or 2], with E4M3 scales fp32 [N, 1, 2]; see `scale_codes`.
    factors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        tensors = (self.packed, self.scales, self.offsets, self.inputs, self.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]


class Matmul(Protocol):
    """A weight in the layout of one kernel; it replaces the tensors it was made from, so no second copy remains."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, K], contiguous: [rows, N] in the dtype of x."""
        ...

    def dequantize(self) -> Tensor: ...


class Kernel(Protocol):
    """Multiplies by packed weights."""

    @property
    def name(self) -> str: ...

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """Return why the product with `dtype` activations is not supported, or None."""
        ...

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Convert `weight` for activations of `dtype`; called only if `decline` returned None."""
        ...


def _low_half(bits: int, width: int) -> int:
    # A mask of the first `width` of every 2 * `width` codes of `bits` bits, `width` codes in `width` bytes.
    return sum(((1 << width * bits) - 1) << start for start in range(0, 64, 16 * width))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [N, K], each below 2^bits, into int32 [N, ceil(K * bits / 32)]."""
    rows, columns = codes.shape
    padded = -columns % _BLOCK
    if 8 % bits == 0:  # a byte holds whole codes, which is several times faster
        parts = torch.nn.functional.pad(codes, (0, padded)).view(rows, -1, 8 // bits)
        packed = parts[:, :, 0].clone()
        for index in range(1, 8 // bits):
            packed |= parts[:, :, index] << index * bits
        return packed.view(torch.int32)[:, : (columns * bits + 31) // 32].contiguous()
    # Eight codes, a byte each in 64 bits, are moved together in pairs, fours and eights, until they fill `bits` bytes.
    eights = torch.nn.functional.pad(codes, (0, padded)).view(torch.int64)
    for width in (1, 2, 4):
        low = _low_half(bits, width)
        eights = (eights >> 8 * width & low) << width * bits | eights & low
    stored = eights.view(torch.uint8).view(rows, -1, 8)[:, :, :bits].reshape(rows, -1)
    return stored.view(torch.int32)[:, : (columns * bits + 31) // 32].contiguous()


def unpack(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """Invert `pack`: int32 [N, words] to uint8 [N, in_features]."""
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


def as_integers(weight: PackedWeight) -> PackedWeight:
    """Return the same weight in the packing of `Packing.as_integers`."""
    packing = weight.packing.as_integers()
    if packing == weight.packing:
        return weight
    levels = (code_table(weight.packing) + (1 << packing.bits - 1)).to(weight.packed.device, torch.uint8)
    codes = levels[unpack(weight.packed, weight.packing.bits, weight.in_features).int()]
    return replace(weight, packed=pack(codes, packing.bits), packing=packing)


def widen(weight: PackedWeight, packing: Packing) -> PackedWeight:
    """Return the same weight in `packing`: its table or integers, at least its bits, groups that divide its groups."""
    if packing.codes == "int":
        weight = as_integers(weight)
    source, packed, scales, offsets = weight.packing, weight.packed, weight.scales, weight.offsets
    if packing.bits != source.bits:
        codes = unpack(packed, source.bits, weight.in_features)
        moved = (1 << packing.bits - 1) - (1 << source.bits - 1) if packing.codes == "int" else 0
        packed = pack(codes + moved, packing.bits)
    if packing.group_size is not None and source.group_size != packing.group_size:
        times = (source.group_size or weight.in_features) // packing.group_size
        scales = scales.repeat_interleave(times, dim=1)
        offsets = None if offsets is None else offsets.repeat_interleave(times, dim=1)
    if packing.offsets and offsets is None:
        offsets = torch.zeros_like(scales, dtype=torch.float32)
    return replace(weight, packed=packed, scales=scales, offsets=offsets, packing=packing)


def stack(weights: Sequence[PackedWeight], packing: Packing) -> PackedWeight:
    """Return weights of the same inputs as one, row after row, in their `stacked_packing`."""
    parts = [widen(weight, packing) for weight in weights]
    dtypes = {part.scales.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return replace(
        parts[0],
        packed=torch.cat([part.packed for part in parts]),
        scales=torch.cat([part.scales.to(dtype) for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
        factors=None,
    )


def dequantize(weight: PackedWeight) -> Tensor:
    """Return the weights [N, K] in the dtype of the scales, columns in the order of the inputs."""
    # Symmetric integers are multiplied in that dtype; with offsets or a table the fp32 result is rounded once.
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
    """Yield the rows and values of `dequantize` in parts of about `PART` weights."""
    step = max(1, PART // weight.in_features)
    for start in range(0, weight.out_features, step):
        rows = slice(start, start + step)
        offsets = None if weight.offsets is None else weight.offsets[rows]
        part = replace(weight, packed=weight.packed[rows], scales=weight.scales[rows], offsets=offsets, factors=None)
        yield rows, dequantize(part)
