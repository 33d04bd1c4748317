"""Products on the CPU with the same bits on every processor that has fused multiply-adds."""

import platform

import torch

from mycli.runtime.device.placement import decline_dtype
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import ROW_TYPES
from mycli.runtime.kernels.cpu.matmul import PortableMatmul
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.quantization.packed_weight import Matmul

_NO_FMA = Declined("no-fused-multiply-add")


def decline_portable(device: torch.device, dtype: torch.dtype) -> Declined | None:
    """Return why native code cannot give this machine's results the bits of other processors, or None."""
    if device.type != "cpu":
        return Declined("not-on-cpu", {"device": device})
    if dtype != torch.bfloat16:
        return decline_dtype(dtype)
    library = build.native()
    if isinstance(library, Declined):
        return library
    return _NO_FMA if library.isa == "plain" and platform.machine() == "x86_64" else None


def portable_product(matmul: Matmul) -> Matmul:
    """Return the product of a dense or table weight with the same bits on every processor; others as they are."""
    library = build.native()
    if isinstance(matmul, TableMatmul):
        matmul.make_portable()
    if not isinstance(matmul, DenseMatmul) or isinstance(library, Declined):
        return matmul
    weight = matmul.dequantize()
    return PortableMatmul(library, weight) if weight.is_cpu and weight.dtype in ROW_TYPES else matmul
