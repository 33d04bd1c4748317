"""Packed products on the CPU: our own code, compiled for the machine, and torch's 4-bit operator where that cannot be.

Few rows are as fast as the weights can be read; many rows run in AMX tiles, or on machines without them as a dense
product of a part of the weight at a time. The layout and the arithmetic are in packed_cpu.cpp.
"""

import ctypes
import time

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.errors import ResourceError
from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu.build import CWeight, Native
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, unpack
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.huge_pages import huge_empty

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `Type` of packed_cpu.cpp
_ROWS, _INPUTS = 16, 32  # of a block
_FEW = 16  # rows; from here on a dense product of unpacked weights beats many dot products
_PART = 1 << 24  # weights unpacked at a time for a dense product: 32 MiB of bf16


def _decline(
    packing: Packing, in_features: int, device: torch.device, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> str | None:
    if device.type != "cpu":
        return "runs on the CPU only"
    if dtype not in dtypes:
        return f"{dtype} activations are not supported"
    if in_features % _INPUTS:
        return f"{in_features} inputs are no multiple of {_INPUTS}"
    return None


class CpuMatmul:
    """A weight in the blocks of packed_layout.h.

    Of fewer than 16 rows, each has the same bits alone or beside others and with any number of threads. With AMX that
    holds for bf16 up to 47 rows; else 16 rows and more are a dense product by torch, whose bits may differ.
    """

    def __init__(self, library: Native, weight: PackedWeight) -> None:
        blocks = -(-weight.out_features // _ROWS)
        groups = weight.packing.groups(weight.in_features)
        self._library = library
        self._shape = weight.out_features, weight.in_features
        nbytes = blocks * _ROWS * weight.in_features * weight.packing.bits // 8
        self._codes = huge_empty((nbytes,), torch.uint8)
        self._scales = torch.zeros(blocks * _ROWS, groups, dtype=weight.scales.dtype)
        self._scales[: weight.out_features] = weight.scales
        self._scales = self._scales.view(blocks, _ROWS, groups).transpose(1, 2).contiguous()
        self._weight = CWeight(
            codes=self._codes.data_ptr(),
            scales=self._scales.data_ptr(),
            rows=weight.out_features,
            inputs=weight.in_features,
            group=weight.in_features // groups,
            bits=weight.packing.bits,
            scale_type=_TYPES[weight.scales.dtype],
        )
        self._pointer = ctypes.pointer(self._weight)
        packed = weight.packed.contiguous()
        library.repack(self._pointer, packed.data_ptr(), packed.shape[1], torch.get_num_threads())

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K] of bf16, fp16 or fp32 to [rows, N] in the dtype of x."""
        rows, inputs = x.shape
        assert inputs == self._shape[1] and x.device.type == "cpu"
        if rows >= _FEW and not (self._library.amx and x.dtype == torch.bfloat16):
            return self._dense(x)
        native_type = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and self._library.bf16)
        given = (x if native_type else x.float()).contiguous()
        y = torch.empty(rows, self._shape[0], dtype=given.dtype)
        failed = self._library.matmul(
            self._pointer, given.data_ptr(), _TYPES[given.dtype], rows, y.data_ptr(), torch.get_num_threads()
        )
        if failed:
            raise ResourceError(f"no memory for {rows} rows of {inputs} activations", "choose a smaller prefill chunk")
        return y if native_type else y.to(x.dtype)

    def _dense(self, x: Tensor) -> Tensor:
        """Many rows without AMX: a part of the weight at a time becomes dense, in a type that torch multiplies fast."""
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 and self._library.dense_bf16 else torch.float32
        given, outputs = x.to(dtype), self._shape[0]
        step = max(_ROWS, _PART // self._shape[1] // _ROWS * _ROWS)
        y = torch.empty(x.shape[0], outputs, dtype=x.dtype)
        part = torch.empty(min(step, outputs), self._shape[1], dtype=dtype)
        for first in range(0, outputs, step):
            rows = part[: min(step, outputs - first)]
            self._unpack(first, rows)
            y[:, first : first + step] = functional.linear(given, rows)
        return y

    def _unpack(self, first: int, out: Tensor) -> None:
        threads = torch.get_num_threads()
        self._library.dequantize(self._pointer, first, out.shape[0], out.data_ptr(), _TYPES[out.dtype], threads)

    def dequantize(self) -> Tensor:
        """The weight [N, K] in the dtype of its scales."""
        out = torch.empty(self._shape, dtype=self._scales.dtype)
        self._unpack(0, out)
        return out


class CpuKernel:
    """All widths and activations, where packed_cpu.cpp can be compiled."""

    name = "cpu"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """Declines without a compiler, and for inputs that are no multiple of 32. The first call may build."""
        if not packing.plain:
            return f"does not take {packing.name}"
        reason = _decline(packing, in_features, device, dtype, tuple(_TYPES))
        library = build.native()
        return reason or (library if isinstance(library, str) else None)

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
    ) -> str | None:
        """Takes 4 bits in groups, for outputs in multiples of 16."""
        if packing.bits != 4 or packing.group_size is None or not packing.plain:
            return f"takes int4 in groups, not {packing.name}"
        if out_features % _ROWS:
            return f"{out_features} outputs are no multiple of {_ROWS}"
        return _decline(packing, in_features, device, dtype, (torch.bfloat16,))

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Repacked by torch."""
        return TorchInt4Matmul(weight)


def dense_few(x: Tensor, weight: Tensor) -> Tensor | str:
    """x [1..4, K] times a dense weight [N, K], both bf16 on the CPU, at the rate of memory, which oneDNN is far from.

    The reason where this code cannot.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return "takes bf16 on the CPU only"
    if x.shape[0] > 4 or x.shape[1] % _INPUTS:
        return f"takes up to 4 rows, of inputs in multiples of {_INPUTS}"
    library = build.native()
    if isinstance(library, str):
        return library
    if not library.dense_bf16:
        return "needs AVX-512 with bf16"
    given, (outputs, inputs) = x.contiguous(), weight.shape
    assert weight.is_contiguous() and inputs == x.shape[1]
    y = torch.empty(x.shape[0], outputs, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    library.dense(weight.data_ptr(), outputs, inputs, given.data_ptr(), x.shape[0], y.data_ptr(), threads)
    return y


def memory_bandwidth(nbytes: int = 1 << 29, repeats: int = 5) -> float | None:
    """Bytes per second that all threads read together from `nbytes` of memory, the best of `repeats`.

    None where there is no native code. `nbytes` should be several times what the caches hold.
    """
    library = build.native()
    if isinstance(library, str):
        return None
    memory = huge_empty((nbytes,), torch.uint8).fill_(1)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        library.read(memory.data_ptr(), nbytes, torch.get_num_threads())
        best = min(best, time.perf_counter() - start)
    return nbytes / best
