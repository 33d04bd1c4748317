"""Packed weights where no kernel multiplies them: unpacked once, at load, and multiplied densely from then on.

For GPUs older than those that the Triton kernels are for. Takes four times the memory of 4-bit weights, which the
check before loading counts; to unpack them again for every pass would take a second a token. Does not know which
models fit.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.device.placement import why_unpacked
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize
from mycli.runtime.quantization.scheme import Packing


class UnpackedMatmul:
    """A weight [N, K] in the dtype of activations."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K] to [rows, N] in the dtype of x."""
        return functional.linear(x, self._weight)

    def dequantize(self) -> Tensor:
        """The weight itself."""
        return self._weight


class UnpackedKernel:
    """Takes every product on a GPU that has no kernel for packed weights."""

    name = "unpacked"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """Any other device: elsewhere weights stay packed."""
        if why_unpacked(device) is None:
            return "is for GPUs below compute capability 8.0"
        return None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Unpack it; the caller then drops the tensors it came from."""
        return UnpackedMatmul(dequantize(weight).to(dtype))
