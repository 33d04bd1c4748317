"""Products of weights in 8-bit floats or tables of 16 values on the CPU in C++ (table.h).

Few rows are multiplied by weights decoded in registers; many by dense parts of the weight, decoded one part at a time.
"""

import ctypes

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, CTableWeight, Native
from mycli.runtime.kernels.cpu.matmul import multiply_dense
from mycli.runtime.kernels.reference import DequantizeMatmul
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight
from mycli.runtime.quantization.scheme import Packing

_KINDS = {"e4m3": 1, "e5m2": 2}  # `TableKind` of table.h; the other tables have 4 bits
MAX_DECODED_ROWS = 15  # each row decodes the weight; above, one decoding and a dense product is faster
_PART = 1 << 24  # weights decoded at a time for a dense product


class TableMatmul:
    """A weight in its stored codes. Up to `MAX_DECODED_ROWS` rows, a row's bits do not depend on the others."""

    def __init__(self, library: Native, weight: PackedWeight) -> None:
        self._library, self._shape = library, (weight.out_features, weight.in_features)
        self._packed = weight.packed.contiguous()
        scales = weight.scales if weight.scales.dtype in ROW_TYPES else weight.scales.float()
        self._scales, self._dtype = scales.contiguous(), weight.scales.dtype
        self._values = code_table(weight.packing).contiguous()
        self._table = CTableWeight(
            codes=self._packed.data_ptr(),
            scales=self._scales.data_ptr(),
            values=self._values.data_ptr(),
            rows=weight.out_features,
            inputs=weight.in_features,
            stride=self._packed.shape[1] * self._packed.element_size(),
            group=weight.in_features // weight.packing.groups(weight.in_features),
            kind=_KINDS.get(weight.packing.codes, 0),
            scale_type=ROW_TYPES[self._scales.dtype],
        )
        self._pointer = ctypes.pointer(self._table)

    @property
    def address(self) -> int:
        """The address of its `TableWeight` of table.h, valid while this object lives."""
        return ctypes.addressof(self._table)

    @property
    def portable(self) -> bool:
        """Whether products of any number of rows have the same bits on every processor."""
        return bool(self._table.portable)

    def make_portable(self) -> None:
        self._table.portable = True

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def form(self) -> tuple[int, int, int]:
        """Output features, input features and kind: experts with equal ones are multiplied in one call."""
        return *self._shape, int(self._table.kind)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_DECODED_ROWS and not self.portable:
            return self._dense(x)
        values = x.float().contiguous()
        y = torch.empty(x.shape[0], self._shape[0])
        threads = torch.get_num_threads()
        self._library.table_matmul(self._pointer, values.data_ptr(), x.shape[0], y.data_ptr(), threads)
        return y.to(x.dtype)

    def _dense(self, x: Tensor) -> Tensor:
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        values, outputs = x.to(dtype), self._shape[0]
        step = max(1, _PART // self._shape[1])
        y = torch.empty(x.shape[0], outputs, dtype=x.dtype)
        part = torch.empty(min(step, outputs), self._shape[1], dtype=dtype)
        for first in range(0, outputs, step):
            rows = part[: min(step, outputs - first)]
            self._unpack(first, rows)
            y[:, first : first + step] = multiply_dense(self._library, values, rows)
        return y

    def _unpack(self, first: int, out: Tensor) -> None:
        threads = torch.get_num_threads()
        self._library.table_dequantize(
            self._pointer, first, out.shape[0], out.data_ptr(), ROW_TYPES[out.dtype], threads
        )

    def dequantize(self) -> Tensor:
        out = torch.empty(self._shape, dtype=self._dtype if self._dtype in ROW_TYPES else torch.float32)
        self._unpack(0, out)
        return out.to(self._dtype)


class TableKernel:
    """Multiplies codes of tables in groups that are a multiple of 16 inputs; needs the native library."""

    name = "cpu-table"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        if device.type != "cpu":
            return Declined("not-on-cpu", {"device": device})
        if packing.codes == "int" or packing.offsets:
            return Declined("packing-not-a-table", {"packing": packing.name})
        group = in_features // packing.groups(in_features)
        if group % LANES:
            return Declined("group-not-multiple", {"group": group, "multiple": LANES})
        library = build.native()
        return library if isinstance(library, Declined) else None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        # The kernel does not decode NaN and infinity, which a model may be allowed to hold; the reference does.
        library = build.native()
        assert isinstance(library, Native)
        magnitude = weight.packed.view(torch.uint8) & 0x7F
        largest = {"e4m3": 0x7E, "e5m2": 0x7B}.get(weight.packing.codes, 0x7F)
        return DequantizeMatmul(weight) if bool((magnitude > largest).any()) else TableMatmul(library, weight)
