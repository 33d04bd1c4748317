"""The structures of norms, products and sums that the parts of the native CPU code have in common (rowwise.h)."""

import torch

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.elementwise import GATE_TYPES
from mycli.runtime.kernels.cpu.layer import (
    MAX_PRODUCTS,
    CFeedForward,
    CLinear,
    CNormParams,
    CProduct,
    CResidualAdd,
)
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, pointer
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, PortableMatmul
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.layers.feed_forward import Mlp
from mycli.runtime.layers.layer_part import LayerPart
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import PerLayerSpec
from mycli.runtime.models.part_spec import MlpSpec
from mycli.runtime.quantization.low_rank import LowRankMatmul
from mycli.runtime.quantization.packed_weight import Matmul


class NotNativeError(Exception):
    """Carries why native code does not run a part; `cpu_parts` catches it."""

    def __init__(self, declined: Declined) -> None:
        super().__init__(declined.code)
        self.declined = declined


def require_native(declined: Declined | None) -> None:
    if declined is not None:
        raise NotNativeError(declined)


def whole_vectors(count: int, field: str) -> int:
    """Return `count`; it must be a multiple of the vector length."""
    if count % LANES:
        raise NotNativeError(Declined("vector-multiple", {"field": field, "count": count, "multiple": LANES}))
    return count


def c_norm(norm: RMSNorm | None) -> CNormParams:
    if norm is None:
        return CNormParams()
    gain = norm.weight
    if norm.spec.heads:
        raise NotNativeError(Declined("norm-by-head"))
    if gain.dtype not in ROW_TYPES or not gain.is_contiguous():
        raise NotNativeError(Declined("gain-dtype", {"dtype": str(gain.dtype)}))
    size = whole_vectors(gain.shape[0], "the width of a norm")
    return CNormParams(gain.data_ptr(), pointer(norm.bias), size, norm.eps, ROW_TYPES[gain.dtype], norm.spec.layer_norm)


def require_bf16_gain(norm: RMSNorm) -> None:
    if norm.weight.dtype != torch.bfloat16:
        raise NotNativeError(Declined("recurrent-gain-dtype", {"dtype": str(norm.weight.dtype)}))


def _product(matmul: Matmul) -> CProduct:
    if isinstance(matmul, CpuMatmul):
        return CProduct(matmul.address, None, None, *matmul.shape)
    if isinstance(matmul, TableMatmul) and matmul.portable:
        return CProduct(None, None, matmul.address, *matmul.shape)
    if isinstance(matmul, LowRankMatmul):
        raise NotNativeError(Declined("adapter"))
    if not isinstance(matmul, DenseMatmul):
        raise NotNativeError(Declined("weight-format", {"format": type(matmul).__name__}))
    weight = matmul.dequantize()
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or weight.shape[1] % 32:
        raise NotNativeError(Declined("dense-weight", {"dtype": str(weight.dtype), "inputs": weight.shape[1]}))
    return CProduct(None, weight.data_ptr(), None, *weight.shape, isinstance(matmul, PortableMatmul))


def c_linear(linear: Linear | None) -> CLinear:
    if linear is None:
        return CLinear()
    if not 0 < len(linear.matmuls) <= MAX_PRODUCTS:
        raise NotNativeError(Declined("product-parts", {"count": len(linear.matmuls), "most": MAX_PRODUCTS}))
    parts = [_product(matmul) for matmul in linear.matmuls]
    return CLinear((CProduct * MAX_PRODUCTS)(*parts), len(parts), linear.out_features, c_bias(linear))


def c_bias(linear: Linear) -> int | None:
    bias = linear.bias
    if bias is not None and bias.dtype != torch.bfloat16:
        raise NotNativeError(Declined("bias-dtype", {"dtype": str(bias.dtype)}))
    if bias is not None:
        whole_vectors(linear.out_features, "the width of a bias")
    return pointer(bias)


def c_residual(part: LayerPart) -> CResidualAdd:
    scalar, hidden = part.scalar, part.products[-1].out_features
    if part.gain is not None:
        raise NotNativeError(Declined("residual-gains"))
    if scalar is not None and scalar.dtype != torch.bfloat16:
        raise NotNativeError(Declined("scalar-dtype", {"dtype": str(scalar.dtype)}))
    return CResidualAdd(c_norm(part.output_norm), pointer(scalar), whole_vectors(hidden, "hidden_size"), part.residual)


def c_gate_type(spec: MlpSpec | ExpertsSpec | PerLayerSpec) -> int:
    """Return `GateType` of steps.h."""
    key = spec.activation, isinstance(spec, PerLayerSpec) or spec.gated
    if key not in GATE_TYPES:
        raise NotNativeError(Declined("activation", {"activation": spec.activation}))
    return GATE_TYPES[key]


def c_feed(spec: MlpSpec, mlp: Mlp) -> CFeedForward:
    if spec.inner_norm is not None:
        raise NotNativeError(Declined("mlp-norm"))
    if spec.sparsity:
        raise NotNativeError(Declined("gate-threshold"))
    size = whole_vectors(spec.size, "intermediate_size")
    return CFeedForward(c_linear(mlp.gate_up), c_linear(mlp.down), size, c_gate_type(spec), spec.gate_scale)
