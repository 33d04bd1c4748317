"""Packed weights where no kernel multiplies them: unpacked once, at load, and multiplied densely from then on.

For GPUs older than those that the Triton kernels are for. Takes four times the memory of 4-bit weights, which the
check before loading counts; to unpack them again for every pass would take a second a token. Does not know which
models fit.
"""

import torch

from mycli.runtime.device.placement import decline_packed
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, dequantize
from mycli.runtime.quantization.scheme import Packing


class UnpackedKernel:
    """Takes every product on a GPU that has no kernel for packed weights."""

    name = "unpacked"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        """Any other device: elsewhere weights stay packed."""
        if decline_packed(device) is None:
            return Declined("only-for-older-gpus", {"capability": "8.0"})
        return None

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        """Unpack it; the caller then drops the tensors it came from."""
        return DenseMatmul(dequantize(weight).to(dtype))
