"""What parts of layers are made of, as our own code on the CPU has it: norms, products, sums on the residual stream.

Knows modules and structures; which parts there are is `runtime.layers.native`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.kernels.cpu.layer import MAX_PRODUCTS, CLinear, CNormParams, CProduct, CResidualAdd
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.quantization.packed_weight import Matmul


class NotNative(Exception):
    """Why a part is run step by step."""


@dataclass(frozen=True)
class Around:
    """What stands around the products of a part: the norms on the residual stream, how the sum is made."""

    norm: RMSNorm | None
    output_norm: RMSNorm | None
    scalar: Tensor | None
    residual: float
    hidden: int


def vectors(count: int, what: str) -> int:
    """`count`, which whole vectors hold. Raises NotNative naming it where they do not."""
    if count % LANES:
        raise NotNative(f"{what} is not a multiple of {LANES}")
    return count


def c_norm(norm: RMSNorm | None) -> CNormParams:
    """`norm` as layer.h has it. Raises NotNative."""
    if norm is None:
        return CNormParams()
    gain = norm.weight
    if gain.dtype not in ROW_TYPES or not gain.is_contiguous():
        raise NotNative("takes norms with gains of bf16 or fp32")
    size = vectors(gain.shape[0], "the width of a norm")
    return CNormParams(gain.data_ptr(), size, norm.eps, ROW_TYPES[gain.dtype], norm.spec.layer_norm)


def _product(matmul: Matmul) -> CProduct:
    if isinstance(matmul, CpuMatmul):
        return CProduct(matmul.address, None, *matmul.shape)
    if not isinstance(matmul, DenseMatmul):
        raise NotNative("takes packed and dense weights that native code multiplies by")
    weight = matmul.dequantize()
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or weight.shape[1] % 32:
        raise NotNative("takes dense weights of bf16 and inputs in multiples of 32")
    return CProduct(None, weight.data_ptr(), *weight.shape)


def c_linear(linear: Linear) -> CLinear:
    """`linear` as layer.h has it. Raises NotNative."""
    if not 0 < len(linear.matmuls) <= MAX_PRODUCTS:
        raise NotNative(f"takes products of at most {MAX_PRODUCTS} parts")
    parts = [_product(matmul) for matmul in linear.matmuls]
    return CLinear((CProduct * MAX_PRODUCTS)(*parts), len(parts), linear.out_features, bias_address(linear))


def bias_address(linear: Linear) -> int | None:
    """Where the bias of `linear` lies, bf16 [out_features]; None for none. Raises NotNative."""
    bias = linear.bias
    if bias is not None and (bias.dtype != torch.bfloat16 or linear.out_features % LANES):
        raise NotNative("takes biases of bf16, in multiples of vectors")
    return pointer(bias)


def c_residual(around: Around) -> CResidualAdd:
    """`around` as layer.h has it. Raises NotNative."""
    scalar = around.scalar
    if scalar is not None and scalar.dtype != torch.bfloat16:
        raise NotNative("takes factors of bf16")
    address = None if scalar is None else scalar.data_ptr()
    return CResidualAdd(c_norm(around.output_norm), address, vectors(around.hidden, "the stream"), around.residual)


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; None for none."""
    return None if tensor is None else tensor.data_ptr()
