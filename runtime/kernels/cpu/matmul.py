"""Packed and dense products on the CPU: our own code, compiled for the machine, and torch's 4-bit operator without it.

Few rows are as fast as the weights can be read, many as the machine multiplies. The layout and the arithmetic are in
packed_cpu.cpp: one for every number of rows, so that a row's bits do not depend on the rows beside it.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import ROW_TYPES, STORED_TYPES, CWeight, Native
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, unpack
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.quantization.super_blocks import scale_codes
from mycli.runtime.utils.memory import HUGE, huge_empty

_ROWS, _INPUTS = 16, 32  # of a block
DENSE_INPUTS = 32  # of a dense weight: a multiple of these
_BITS = (8, 6, 5, 4, 3, 2)
_GROUP = 16  # groups are multiples of this
_BYTES = 3  # `I8` of packed_layout.h
_DENSE_TYPES = Declined("dense-product-types")
_DENSE_LAYOUT = Declined("dense-weight-layout", {"multiple": DENSE_INPUTS})
_GRADIENT = Declined("no-gradient")


def no_room_for(rows: int, inputs: int) -> ResourceError:
    """The error where activations cannot be rearranged."""
    return ResourceError(f"no memory for {rows} rows of {inputs} activations", "choose a smaller prefill chunk")


def _decline(
    packing: Packing, in_features: int, device: torch.device, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> Declined | None:
    if device.type != "cpu":
        return Declined("not-on-cpu", {"device": device})
    if dtype not in dtypes:
        return Declined("activation-dtype", {"dtype": dtype})
    if in_features % _INPUTS:
        return Declined("inputs-not-multiple", {"inputs": in_features, "multiple": _INPUTS})
    return None


def _blocked(values: Tensor) -> Tensor:
    """Scales or offsets [N, groups] as packed_layout.h has them: [blocks, groups, 16], rows past the last zero."""
    rows, groups = values.shape
    blocks = -(-rows // _ROWS)
    padded = values.new_zeros(blocks * _ROWS, groups)
    padded[:rows] = values
    return padded.view(blocks, _ROWS, groups).transpose(1, 2).contiguous()


def _halved(scales: Tensor) -> Tensor:
    """Half of `scales`, exactly: of what fp16 has no half for in fp32."""
    half = scales / 2
    return half if torch.equal(half * 2, scales) else scales.float() / 2


@dataclass(frozen=True)
class _Scales:
    """Scales, offsets and factors as packed_layout.h has them."""

    scales: Tensor
    offsets: Tensor | None
    factors: Tensor | None

    @classmethod
    def of(cls, weight: PackedWeight) -> "_Scales":
        """Bytes where these and the factors of super-blocks give the very numbers; else the numbers themselves."""
        codes = scale_codes(weight)
        if codes is None:
            scales = weight.scales if weight.scales.dtype in STORED_TYPES else weight.scales.float()
            scales = _halved(scales) if weight.packing.codes == "e2m1" else scales
            return cls(_blocked(scales), None if weight.offsets is None else _blocked(weight.offsets), None)
        assert weight.factors is not None
        offsets = None if codes.offsets is None else _blocked(codes.offsets)
        factors = torch.stack([_blocked(weight.factors[..., kind]) for kind in range(weight.factors.shape[2])], dim=2)
        return cls(_blocked(codes.scales), offsets, factors)

    def all(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return tuple(one for one in (self.scales, self.offsets, self.factors) if one is not None)


class CpuMatmul:
    """A weight in the blocks of packed_layout.h.

    A row's bits depend on neither the number of rows, the rows beside it nor the number of threads.
    """

    def __init__(self, library: Native, weight: PackedWeight) -> None:
        blocks = -(-weight.out_features // _ROWS)
        self._library = library
        self._shape = weight.out_features, weight.in_features
        nbytes = blocks * _ROWS * weight.in_features * weight.packing.bits // 8
        self._codes = huge_empty((nbytes,), torch.uint8)
        self._scales = _Scales.of(weight)
        number = self._scales.factors is None and weight.scales.dtype in STORED_TYPES
        self._dtype = weight.scales.dtype if number else torch.float32
        scales, *others = self._scales.scales, self._scales.offsets, self._scales.factors
        offsets, factors = (None if one is None else one.data_ptr() for one in others)
        self._weight = CWeight(
            codes=self._codes.data_ptr(),
            scales=scales.data_ptr(),
            offsets=offsets,
            factors=factors,
            rows=weight.out_features,
            inputs=weight.in_features,
            group=weight.in_features // weight.packing.groups(weight.in_features),
            bits=weight.packing.bits,
            scale_type=_BYTES if factors else STORED_TYPES[scales.dtype],
            e2m1=weight.packing.codes == "e2m1",
        )
        self._pointer = ctypes.pointer(self._weight)
        self._repack(weight.packed)

    def _repack(self, words: Tensor) -> None:
        packed = words.contiguous()
        self._library.repack(self._pointer, packed.data_ptr(), packed.shape[1], torch.get_num_threads())

    def refill(self, weight: PackedWeight) -> bool:
        """Become the product of another weight, in the same memory; False where that is of another form.

        The address stays.
        """
        own, packing = self._weight, weight.packing
        group = weight.in_features // packing.groups(weight.in_features)
        shape = weight.out_features, weight.in_features, group, packing.bits, packing.codes
        if shape != (own.rows, own.inputs, own.group, own.bits, "e2m1" if own.e2m1 else "int"):
            return False
        here, given = self._scales.all(), _Scales.of(weight).all()
        if [one.dtype for one in here] != [one.dtype for one in given]:
            return False
        self._repack(weight.packed)
        for to, values in zip(here, given, strict=True):
            to.copy_(values)
        return True

    @property
    def address(self) -> int:
        """Of the `Weight` of packed_layout.h, good for as long as this object."""
        return ctypes.addressof(self._weight)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._shape

    @property
    def form(self) -> tuple[int, int, int]:
        """Outputs, inputs and inputs of a group: weights alike in these can be multiplied in one call."""
        return *self._shape, self._weight.group

    @property
    def small(self) -> bool:
        """Whether its codes are too few for huge pages of their own."""
        return len(self._codes) < HUGE

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._codes.nbytes + sum(one.nbytes for one in self._scales.all())

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K] of bf16, fp16 or fp32 to [rows, N] in the dtype of x."""
        rows, inputs = x.shape
        assert inputs == self._shape[1] and x.device.type == "cpu"
        given = (x.float() if x.dtype == torch.float16 else x).contiguous()
        y = torch.empty(rows, self._shape[0], dtype=given.dtype)
        threads = torch.get_num_threads()
        kind = STORED_TYPES[given.dtype]
        if rows and self._library.matmul(self._pointer, given.data_ptr(), kind, rows, y.data_ptr(), threads):
            raise no_room_for(rows, inputs)
        return y.to(x.dtype)

    def dequantize(self) -> Tensor:
        """The weight [N, K] in the dtype of its scales."""
        out = torch.empty(self._shape, dtype=self._dtype)
        self._library.dequantize(self._pointer, out.data_ptr(), STORED_TYPES[out.dtype], torch.get_num_threads())
        return out


def gather_codes(weights: Sequence[CpuMatmul]) -> None:
    """Move the codes of `weights` into one piece of memory under huge pages, which each alone is too small for."""
    total = sum(len(weight._codes) for weight in weights)
    if total < HUGE:
        return
    room, start = huge_empty((total,), torch.uint8), 0
    for weight in weights:
        weight._codes = room[start : start + len(weight._codes)].copy_(weight._codes)
        weight._weight.codes = weight._codes.data_ptr()
        start += len(weight._codes)


class CpuKernel:
    """Integers of 8, 6, 5, 4, 3 and 2 bits, with or without offsets, and E2M1, where there is a compiler.

    Twice the value of a code of E2M1 is an integer, so these have the arithmetic of integers.
    """

    name = "cpu"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """Declines without a compiler, and for inputs that are not a multiple of 32. The first call may build."""
        reason = _decline(packing, in_features, device, dtype, tuple(STORED_TYPES))
        if reason:
            return reason
        taken = packing.codes == "e2m1" and not packing.offsets or packing.codes == "int" and packing.bits in _BITS
        if not taken or (packing.group_size or _GROUP) % _GROUP:
            widths = ", ".join(map(str, _BITS))
            return Declined("packing-not-integers", {"packing": packing.name, "bits": widths, "multiple": _GROUP})
        library = build.native()
        return library if isinstance(library, Declined) else None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Repacked into blocks of 16 rows; scales keep their type."""
        library = build.native()
        assert isinstance(library, Native)
        return CpuMatmul(library, weight)


class TorchInt4Matmul:
    """A weight as torch's operator wants it."""

    def __init__(self, weight: PackedWeight) -> None:
        codes = unpack(weight.packed, 4, weight.in_features).to(torch.int32)
        self._inputs, self._group = weight.in_features, weight.in_features // weight.scales.shape[1]
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = weight.scales.to(torch.bfloat16).t()
        self._scales = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return int(self._packed.nbytes + self._scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x bf16 [rows, K] to [rows, N]."""
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self._packed, self._group, self._scales)
        return y

    def dequantize(self) -> Tensor:
        """What the operator makes of a unit matrix: each weight rounded to bf16, as by the reference."""
        return self(torch.eye(self._inputs, dtype=torch.bfloat16)).t().contiguous()


class TorchInt4Kernel:
    """torch's own 4-bit operator: no compiler needed; bf16 activations, scales rounded to bf16."""

    name = "torch-int4"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """Takes 4 bits in groups, for outputs in multiples of 16."""
        if packing.bits != 4 or packing.group_size is None or not packing.plain:
            return Declined("packing-not-int4-groups", {"packing": packing.name})
        if out_features % _ROWS:
            return Declined("outputs-not-multiple", {"outputs": out_features, "multiple": _ROWS})
        return _decline(packing, in_features, device, dtype, (torch.bfloat16,))

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Repacked by torch."""
        return TorchInt4Matmul(weight)


def dense_product(x: Tensor, weight: Tensor) -> Tensor | Declined:
    """x [rows, K] times a dense weight [N, K], both bf16 or both fp32 on the CPU, with fp32 sums.

    A row's bits do not depend on the rows beside it. The reason where this code cannot.
    """
    if x.dtype != weight.dtype or x.dtype not in ROW_TYPES or weight.device.type != "cpu":
        return _DENSE_TYPES
    if x.shape[1] % DENSE_INPUTS or not weight.is_contiguous():
        return _DENSE_LAYOUT
    if x.requires_grad or weight.requires_grad:
        return _GRADIENT
    library = build.native()
    if isinstance(library, Declined):
        return library
    return multiply_dense(library, x, weight)


def multiply_dense(library: Native, x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, K] times a contiguous weight [N, K], both bf16 or both fp32; K a multiple of 32."""
    given, (rows, inputs), outputs = x.contiguous(), x.shape, len(weight)
    assert inputs == weight.shape[1] and x.dtype == weight.dtype and x.dtype in ROW_TYPES
    y = torch.empty(rows, outputs, dtype=x.dtype)
    pointers = weight.data_ptr(), outputs, inputs, given.data_ptr(), rows, y.data_ptr()
    if rows and library.dense(STORED_TYPES[x.dtype], *pointers, torch.get_num_threads()):
        raise no_room_for(rows, inputs)
    return y


def memory_bandwidth(nbytes: int = 1 << 29, repeats: int = 5) -> float | None:
    """Bytes per second that all threads read together from `nbytes` of memory, the best of `repeats`.

    None where there is no native code. `nbytes` should be several times what the caches hold.
    """
    library = build.native()
    if isinstance(library, Declined):
        return None
    memory = huge_empty((nbytes,), torch.uint8).fill_(1)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        library.read(memory.data_ptr(), nbytes, torch.get_num_threads())
        best = min(best, time.perf_counter() - start)
    return nbytes / best
