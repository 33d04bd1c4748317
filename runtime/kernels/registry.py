"""The ordered list of kernels that multiply by packed weights: the first that takes a product gets it.

The order is meant to be read: fastest first, the one that takes everything last. A new kernel is its file and one line
here.
"""

import torch

from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.packed_weight import Kernel
from mycli.runtime.quantization.scheme import Packing


def kernels() -> tuple[Kernel, ...]:
    """All kernels, in order of preference."""
    from mycli.runtime.kernels.cpu.matmul import CpuKernel, TorchInt4Kernel
    from mycli.runtime.kernels.reference import DequantizeKernel
    from mycli.runtime.kernels.triton.linear import TritonPacked

    return (CpuKernel(), TorchInt4Kernel(), TritonPacked(), DequantizeKernel())


def choose(packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The first kernel that takes the product; ModelError listing every reason where none does."""
    reasons = []
    for kernel in kernels():
        reason = kernel.decline(packing, out_features, in_features, device, dtype)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise ModelError(
        f"no kernel multiplies {packing.name} weights [{out_features}, {in_features}] by {dtype} on {device}",
        "; ".join(reasons),
    )
