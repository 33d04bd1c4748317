"""The kernel that always works: unpack to a dense matrix with plain torch, then multiply. Any device, slow."""

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize
from mycli.runtime.quantization.scheme import Packing


class _Dequantized:
    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        return self._weight.packed.nbytes + self._weight.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, dequantize(self._weight).to(x.dtype))

    def dequantize(self) -> Tensor:
        return dequantize(self._weight)


class DequantizeKernel:
    """Takes every product; holds the weight as on disk and a dense copy only during the call."""

    name = "dequantize"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """Never declines."""
        return None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Keeps the tensors as they are."""
        return _Dequantized(weight)
