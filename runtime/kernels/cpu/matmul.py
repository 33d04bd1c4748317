"""Packed and dense products on the CPU: C++ compiled for the machine, or torch's 4-bit operator without it.

The layout and the arithmetic are in packed_cpu.cpp, the same for every number of rows: a row's bits depend on neither
the other rows nor the number of threads. Few rows run at memory bandwidth, many at the rate of multiplication.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycli.runtime.device.placement import decline_dtype
from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import ROW_TYPES, STORED_TYPES, CWeight, Native, pointer
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, unpack
from mycli.runtime.quantization.scale_codes import scale_codes
from mycli.runtime.quantization.scheme import SCALE_UNITS, ActivationBits, Packing
from mycli.runtime.utils.memory import HUGE, huge_empty

_ROWS, _INPUTS = 16, 32  # a block of the packed layout
_BITS = (8, 6, 5, 4, 3, 2)
_FILLED_BYTES = 64 << 20
_GROUP = 16  # groups are multiples of this
# `Type` of packed_layout.h.
_SCALE_TYPES = {**STORED_TYPES, torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e8m0fnu: 5}
_E4M3_UNIT = 2.0**8  # which `widen` of packed_layout.h leaves out
# The tables of packed_layout.h.
_TABLES = {"e2m1": 20, "iq4": 36, "iq3_xxs": 52, "iq3_s": 68, "iq2": 83, "iq1": 99}
_DENSE_TYPES = Declined("dense-product-types")
_DENSE_LAYOUT = Declined("dense-weight-layout")
_GRADIENT = Declined("no-gradient")


def no_memory_error(rows: int, inputs: int) -> ResourceError:
    return ResourceError(f"no memory for {rows} rows of {inputs} activations", "choose a smaller prefill chunk")


def _decline(
    packing: Packing, in_features: int, device: torch.device, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> Declined | None:
    if device.type != "cpu":
        return Declined("not-on-cpu", {"device": device})
    if dtype not in dtypes:
        return decline_dtype(dtype)
    if in_features % _INPUTS:
        return Declined("inputs-not-multiple", {"inputs": in_features, "multiple": _INPUTS})
    return None


def _blocked(values: Tensor) -> Tensor:
    # [N, groups] to [blocks, groups, 16], as packed_layout.h has scales and offsets; rows after the last are zero.
    rows, groups = values.shape
    blocks = -(-rows // _ROWS)
    padded = values.new_zeros(blocks * _ROWS, groups)
    padded[:rows] = values
    return padded.view(blocks, _ROWS, groups).transpose(1, 2).contiguous()


def _halved(weight: PackedWeight) -> PackedWeight:
    half = weight.scales / 2
    if not torch.equal(half * 2, weight.scales):  # fp16 may have no half of a scale
        half = weight.scales.float() / 2
    return replace(weight, scales=half, factors=None if weight.factors is None else weight.factors / 2)


@dataclass(frozen=True)
class _Scales:
    """Scales, offsets and factors in the layout of packed_layout.h."""

    scales: Tensor
    offsets: Tensor | None
    factors: Tensor | None

    @classmethod
    def of(cls, weight: PackedWeight) -> "_Scales":
        # The kernel multiplies by twice the value of an E2M1 code, which is an integer; it halves powers of two itself.
        halved = _halved(weight) if weight.packing.codes == "e2m1" else weight
        codes = scale_codes(weight if weight.packing.byte_scales == "e8m0" else halved)
        if codes is None:
            scales = halved.scales if halved.scales.dtype in STORED_TYPES else halved.scales.float()
            return cls(_blocked(scales), None if weight.offsets is None else _blocked(weight.offsets), None)
        factors = None
        if codes.factors is not None:
            factors = torch.stack([_blocked(kind) for kind in codes.factors.unbind(2)], dim=2)
        scales = _blocked(codes.scales.view(torch.uint8)).view(codes.scales.dtype)
        return cls(scales, None if codes.offsets is None else _blocked(codes.offsets), factors)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.scales, self.offsets, self.factors) if tensor is not None)


class CpuMatmul:
    """A packed weight in the blocks of packed_layout.h."""

    def __init__(self, library: Native, weight: PackedWeight) -> None:
        blocks = -(-weight.out_features // _ROWS)
        self._library = library
        self._shape = weight.out_features, weight.in_features
        nbytes = blocks * _ROWS * weight.in_features * weight.packing.bits // 8
        self._codes = huge_empty((nbytes,), torch.uint8)
        self._scales = _Scales.of(weight)
        self._dtype = weight.scales.dtype if weight.scales.dtype in STORED_TYPES else torch.float32
        scales, offsets, factors = self._scales.scales, self._scales.offsets, self._scales.factors
        self._weight = CWeight(
            codes=self._codes.data_ptr(),
            scales=scales.data_ptr(),
            offsets=pointer(offsets),
            factors=pointer(factors),
            rows=weight.out_features,
            inputs=weight.in_features,
            group=weight.in_features // weight.packing.groups(weight.in_features),
            bits=weight.packing.bits,
            scale_type=_SCALE_TYPES[scales.dtype],
            kind=_TABLES.get(weight.packing.codes, weight.packing.bits),
            activations=weight.packing.activations,
            unit=_E4M3_UNIT if scales.dtype == torch.float8_e4m3fn else SCALE_UNITS.get(weight.packing.codes, 1.0),
        )
        self._pointer = ctypes.pointer(self._weight)
        self._repack(weight.packed)

    def _repack(self, words: Tensor) -> None:
        packed = words.contiguous()
        self._library.repack(self._pointer, packed.data_ptr(), packed.shape[1], torch.get_num_threads())

    def refill(self, weight: PackedWeight) -> bool:
        """Replace the weight in place, at the same address; False, changing nothing, if its shape or types differ."""
        current, packing = self._weight, weight.packing
        group = weight.in_features // packing.groups(weight.in_features)
        kind = _TABLES.get(packing.codes, packing.bits)
        shape = weight.out_features, weight.in_features, group, kind, packing.activations
        if shape != (current.rows, current.inputs, current.group, current.kind, current.activations):
            return False
        targets, sources = self._scales.tensors(), _Scales.of(weight).tensors()
        if [tensor.dtype for tensor in targets] != [tensor.dtype for tensor in sources]:
            return False
        self._repack(weight.packed)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return True

    @property
    def address(self) -> int:
        """The address of its `Weight` of packed_layout.h, valid while this object lives."""
        return ctypes.addressof(self._weight)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def form(self) -> tuple[int, int, int, int]:
        """Outputs, inputs, group size and bits of activations: experts with equal ones are multiplied in one call."""
        return *self._shape, self._weight.group, self._weight.activations

    def round_activations(self, bits: ActivationBits) -> None:
        """Multiply bf16 activations as integers of `bits` from now on."""
        self._weight.activations = bits

    @property
    def small(self) -> bool:
        """Whether its codes do not fill a huge page, so that `gather_codes` is worth it."""
        return len(self._codes) < HUGE

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + sum(tensor.nbytes for tensor in self._scales.tensors())

    def __call__(self, x: Tensor) -> Tensor:
        rows, inputs = x.shape
        assert inputs == self._shape[1] and x.device.type == "cpu"
        values = (x.float() if x.dtype == torch.float16 else x).contiguous()
        y = torch.empty(rows, self._shape[0], dtype=values.dtype)
        threads = torch.get_num_threads()
        row_type = STORED_TYPES[values.dtype]
        if rows and self._library.matmul(self._pointer, values.data_ptr(), row_type, rows, y.data_ptr(), threads):
            raise no_memory_error(rows, inputs)
        return y.to(x.dtype)

    def dequantize(self) -> Tensor:
        out = torch.empty(self._shape, dtype=self._dtype)
        self._library.dequantize(self._pointer, out.data_ptr(), STORED_TYPES[out.dtype], torch.get_num_threads())
        return out


def gather_codes(weights: Sequence[CpuMatmul]) -> None:
    """Move the codes of `weights`, each too small for a huge page, into one allocation of huge pages."""
    total = sum(len(weight._codes) for weight in weights)
    if total < HUGE:
        return
    memory, start = huge_empty((total,), torch.uint8), 0
    for weight in weights:
        weight._codes = memory[start : start + len(weight._codes)].copy_(weight._codes)
        weight._weight.codes = weight._codes.data_ptr()
        start += len(weight._codes)


class CpuKernel:
    """Multiplies integers of 8, 6, 5, 4, 3 and 2 bits, with or without offsets, and tables of integers, in C++."""

    name = "cpu"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        declined = _decline(packing, in_features, device, dtype, tuple(STORED_TYPES))
        if declined:
            return declined
        # Twice the value of an E2M1 code is an integer, so these codes share the arithmetic of integers.
        table = packing.codes in _TABLES and not packing.offsets
        integers = table or packing.codes == "int" and packing.bits in _BITS
        if not integers or (packing.group_size or _GROUP) % _GROUP:
            widths = ", ".join(map(str, _BITS))
            return Declined("packing-not-integers", {"packing": packing.name, "bits": widths, "multiple": _GROUP})
        library = build.native()
        return library if isinstance(library, Declined) else None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        library = build.native()
        assert isinstance(library, Native)
        return CpuMatmul(library, weight)


class TorchInt4Matmul:
    """A packed weight in the layout of torch's int4 operator."""

    def __init__(self, weight: PackedWeight) -> None:
        codes = unpack(weight.packed, 4, weight.in_features).to(torch.int32)
        self._inputs, self._group = weight.in_features, weight.in_features // weight.scales.shape[1]
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = weight.scales.to(torch.bfloat16).t()
        self._scales = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()

    @property
    def nbytes(self) -> int:
        return int(self._packed.nbytes + self._scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self._packed, self._group, self._scales)
        return y

    def dequantize(self) -> Tensor:
        # The product of a unit matrix: each weight rounded to bf16, as the reference rounds it.
        return self(torch.eye(self._inputs, dtype=torch.bfloat16)).t().contiguous()


class TorchInt4Kernel:
    """Multiplies int4 by torch's own operator, without a compiler: bf16 activations, scales rounded to bf16."""

    name = "torch-int4"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        if packing.bits != 4 or packing.group_size is None or not packing.plain:
            return Declined("packing-not-int4-groups", {"packing": packing.name})
        if out_features % _ROWS:
            return Declined("outputs-not-multiple", {"outputs": out_features, "multiple": _ROWS})
        return _decline(packing, in_features, device, dtype, (torch.bfloat16,))

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        return TorchInt4Matmul(weight)


def dense_product(x: Tensor, weight: Tensor) -> Tensor | Declined:
    """x [rows, K] times a dense weight [N, K], both bf16 or both fp32 on the CPU, with fp32 sums."""
    if x.dtype != weight.dtype or x.dtype not in ROW_TYPES or weight.device.type != "cpu":
        return _DENSE_TYPES
    if not weight.is_contiguous():
        return _DENSE_LAYOUT
    if x.requires_grad or weight.requires_grad:
        return _GRADIENT
    library = build.native()
    if isinstance(library, Declined):
        return library
    return multiply_dense(library, x, weight)


def multiply_dense(library: Native, x: Tensor, weight: Tensor, *, portable: bool = False) -> Tensor:
    """x [rows, K] times a contiguous weight [N, K], both bf16 or both fp32; `portable`: by portable_dense.h."""
    values, (rows, inputs), outputs = x.contiguous(), x.shape, len(weight)
    assert inputs == weight.shape[1] and x.dtype == weight.dtype and x.dtype in ROW_TYPES
    y = torch.empty(rows, outputs, dtype=x.dtype)
    pointers = weight.data_ptr(), outputs, inputs, values.data_ptr(), rows, y.data_ptr()
    if rows and library.dense(STORED_TYPES[x.dtype], *pointers, portable, torch.get_num_threads()):
        raise no_memory_error(rows, inputs)
    return y


def memory_bandwidth(nbytes: int = 1 << 29, repeats: int = 5) -> float | None:
    """Return the bytes per second that all threads read together, the best of `repeats`; None without native code.

    `nbytes` should be several times the size of the caches.
    """
    library = build.native()
    if isinstance(library, Declined):
        return None
    memory = huge_empty((nbytes,), torch.uint8)
    for offset in range(0, nbytes, _FILLED_BYTES):  # an interrupt is noticed between calls; a GiB may take seconds
        memory[offset : offset + _FILLED_BYTES].fill_(1)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        library.read(memory.data_ptr(), nbytes, torch.get_num_threads())
        best = min(best, time.perf_counter() - start)
    return nbytes / best


class PortableMatmul(DenseMatmul):
    """A dense weight [N, K] whose products are those of portable_dense.h."""

    def __init__(self, library: Native, weight: Tensor) -> None:
        super().__init__(weight.contiguous())
        self._library = library

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_dense(self._library, x, self._weight, portable=True)
