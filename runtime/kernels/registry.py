"""The kernels of each operation in order of preference; the first that does not return `Declined` computes it.

Fastest first, the reference last. A new kernel is its file and one line here. A packed weight is bound to a kernel at
load, because the kernel chooses its layout (`select_kernel`); every other operation tries its kernels in each call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels import recurrent, reference, reference_attention
from mycli.runtime.kernels.cpu.attention import attend_cached, attend_paged, native_stored
from mycli.runtime.kernels.cpu.elementwise import (
    native_clamped_swiglu,
    native_gelu,
    native_gelu_multiply,
    native_gelu_tanh,
    native_layer_norm,
    native_relu_square_multiply,
    native_rms_norm,
    native_rotate,
    native_silu_multiply,
    native_swiglu_halves,
    native_weigh_rows,
)
from mycli.runtime.kernels.cpu.experts import native_route, native_routed_product, native_weighted_sum
from mycli.runtime.kernels.cpu.matmul import CpuKernel, CpuMatmul, TorchInt4Kernel, dense_product
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.recurrent import DeltaSizes, DeviceRuns, Runs, ScanSizes
from mycli.runtime.kernels.routed import Route
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Kernel, Matmul, PackedWeight
from mycli.runtime.quantization.scheme import Packing

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Operation(Generic[_P, _R]):
    """An operation with its kernels in order of preference."""

    name: str
    kernels: tuple[Callable[_P, _R | Declined], ...]

    def attempt(self, *arguments: _P.args, **options: _P.kwargs) -> _R | None:
        """Compute with the first kernel that supports the arguments, or return None if none does."""
        for kernel in self.kernels:
            result = kernel(*arguments, **options)
            if not isinstance(result, Declined):
                return result
        return None

    def __call__(self, *arguments: _P.args, **options: _P.kwargs) -> _R:
        """Compute with the first kernel that supports the arguments. Raises ModelError if none does."""
        declined: dict[str, Declined] = {}
        for kernel in self.kernels:
            result = kernel(*arguments, **options)
            if not isinstance(result, Declined):
                return result
            declined[kernel.__name__] = result
        operands = ", ".join(f"{tuple(a.shape)} {a.dtype}" if isinstance(a, Tensor) else str(a) for a in arguments)
        message = f"no kernel computes {self.name} of {operands}"
        raise ModelError(message, code="all-kernels-declined", data={"declined": declined})


_FP32 = Declined("fp32-outside-inference")
_EXPERT_ROWS = 64


def _fp32_inference(
    kernel: Callable[Concatenate[Tensor, _P], Tensor | Declined],
) -> Callable[Concatenate[Tensor, _P], Tensor | Declined]:
    # Replies, which are computed in inference mode, need the bits of a row to depend on that row alone. Calibration and
    # evaluation run outside of it on whole prompts and need speed: torch multiplies many fp32 rows faster.
    @wraps(kernel)
    def wrapped(x: Tensor, *arguments: _P.args, **options: _P.kwargs) -> Tensor | Declined:
        if x.dtype == torch.float32 and not torch.is_inference_mode_enabled():
            return _FP32
        return kernel(x, *arguments, **options)

    return cast("Callable[Concatenate[Tensor, _P], Tensor | Declined]", wrapped)  # `wraps` hides its type


def _lazy(module: str, name: str, **options: object) -> Callable[..., Any]:
    # Imported when it is first tried: no GPU code where the native kernels compute everything, and no kernels of layers
    # that a model does not have.
    def kernel(*arguments: object) -> object:
        return getattr(import_module(f"mycli.runtime.{module}"), name)(*arguments, **options)

    kernel.__name__ = name
    return kernel


def _recurrent(name: str) -> tuple[Callable[..., Any], ...]:
    native, device = (
        _lazy("kernels.cpu.recurrent", f"native_{name}"),
        _lazy("kernels.triton.recurrent", f"triton_{name}"),
    )
    return native, device, _lazy("kernels.recurrent", name)


DENSE_PRODUCT: Operation[[Tensor, Tensor], Tensor]
DENSE_PRODUCT = Operation(
    "dense product",
    (_fp32_inference(dense_product), _lazy("kernels.cpu.rounded", "rounded_product"), functional.linear),
)
RMS_NORM: Operation[[Tensor, Tensor, float], Tensor]
RMS_NORM = Operation("RMSNorm", (native_rms_norm, reference.rms_norm))
ROTATION: Operation[[Tensor, Tensor, Tensor, bool], Tensor]
ROTATION = Operation("rotation", (native_rotate, reference.rotate_heads))
LAYER_NORM: Operation[[Tensor, Tensor, float, Tensor | None], Tensor]
LAYER_NORM = Operation("LayerNorm", (native_layer_norm, reference.layer_norm))
# By `runtime.models.part_spec.ActivationName` and whether the MLP has a gate; the operand is the output of its first
# product.
ACTIVATION: Mapping[tuple[str, bool], Operation[[Tensor], Tensor]] = {
    ("silu", True): Operation("SiLU", (native_silu_multiply, reference.silu_multiply)),
    ("gelu_tanh", True): Operation("GELU", (native_gelu_multiply, reference.gelu_multiply)),
    ("swiglu_clamped", True): Operation("clamped SwiGLU", (native_clamped_swiglu, reference.clamped_swiglu)),
    ("swiglu_halves", True): Operation("clamped SwiGLU of halves", (native_swiglu_halves, reference.swiglu_halves)),
    ("relu", True): Operation("gated ReLU", (reference.relu_multiply,)),
    ("relu2", True): Operation("gated squared ReLU", (native_relu_square_multiply, reference.relu_square_multiply)),
    ("gelu_tanh", False): Operation("GELU without a gate", (native_gelu_tanh, reference.gelu_tanh)),
    ("gelu", False): Operation("exact GELU", (native_gelu, reference.gelu)),
    ("relu2", False): Operation("squared ReLU", (reference.relu_square,)),
}
XIELU: Operation[[Tensor, Sequence[Tensor]], Tensor] = Operation("xIELU", (reference.xielu,))
ATTENTION: Operation[
    [Tensor, Stored, Stored, Tensor | None, int | None, float | None, float | None, Tensor | None, int | None], Tensor
]
ATTENTION = Operation("attention", (attend_cached, reference_attention.attend_dense))
PAGED_ATTENTION: Operation[[Tensor, Stored, Stored, Ragged, Scoring], Tensor] = Operation(
    "attention over blocks",
    (attend_paged, _lazy("kernels.triton.paged_attention", "triton_attend_paged"), reference_attention.attend_gathered),
)
# Without the last resort: on a GPU gathered blocks and torch's attention are faster than the reference.
PROMPT_ATTENTION: Operation[[Tensor, Stored, Stored, Ragged, Scoring], Tensor] = Operation(
    "attention of prompts over blocks", (_lazy("kernels.triton.paged_attention", "triton_attend_prompt"),)
)
LATENT_ATTENTION: Operation[[Tensor, Tensor, Stored, Stored, Ragged, float], Tensor] = Operation(
    "latent attention over blocks",
    (
        _lazy("kernels.cpu.latent", "native_latent_attention"),
        _lazy("kernels.triton.latent", "triton_latent_attention"),
        reference_attention.attend_latent,
    ),
)
HEAD_PRODUCT: Operation[[Tensor, Tensor], Tensor]
HEAD_PRODUCT = Operation(
    "product by heads", (_fp32_inference(_lazy("kernels.cpu.latent", "native_head_product")), reference.head_product)
)
PORTABLE_HEAD_PRODUCT: Operation[[Tensor, Tensor], Tensor]
PORTABLE_HEAD_PRODUCT = Operation(
    "portable product by heads", (_lazy("kernels.cpu.latent", "native_head_product", portable=True),)
)
CACHE_VECTORS: Operation[[Tensor, torch.dtype], Stored] = Operation(
    "conversion to the cache's dtype", (native_stored, Stored.of)
)
# The references compute the runs that the host knows.
CONVOLUTION: Operation[[Tensor, Tensor, Tensor | None, Tensor, Runs | DeviceRuns, bool], Tensor]
CONVOLUTION = Operation("short convolution", _recurrent("convolve"))
DELTA_RULE: Operation[[Tensor, Tensor, Tensor, Tensor, Tensor, Runs | DeviceRuns, DeltaSizes], Tensor]
DELTA_RULE = Operation("gated delta rule", _recurrent("delta_rule"))
GATED_NORM: Operation[[Tensor, Tensor, float, Tensor, bool], Tensor]
GATED_NORM = Operation("gated norm", (_lazy("kernels.cpu.recurrent", "native_gated_norm"), recurrent.gated_norm))
SCAN: Operation[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Runs | DeviceRuns, ScanSizes], Tensor]
SCAN = Operation("state space scan", _recurrent("scan"))
GROUP_NORM: Operation[[Tensor, Tensor, float, Tensor, int], Tensor]
GROUP_NORM = Operation(
    "gated norm of groups", (_lazy("kernels.cpu.recurrent", "native_group_norm"), recurrent.group_norm)
)

# MoE layers: choice of experts, their products, the weighted sum of their outputs, the gate of a shared expert.
ROUTING: Operation[[Tensor, RoutingSpec, Tensor | None], Route]
ROUTING = Operation("routing", (native_route, _lazy("kernels.triton.experts", "triton_route"), reference.route))


def _expert_product(x: Tensor, weight: Tensor) -> Tensor:
    # oneDNN keeps what it compiles for each number of rows, which differs from expert to expert: hundreds of MiB in a
    # pass of calibration. Rows of zeros make the numbers few.
    if not x.is_cpu or torch.is_inference_mode_enabled():
        return DENSE_PRODUCT(x, weight)
    rows = len(x)
    return DENSE_PRODUCT(functional.pad(x, (0, 0, 0, -rows % _EXPERT_ROWS)), weight)[:rows]


def _routed_product(weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor:
    return reference.routed_product(weights, x, starts, tokens, _expert_product)


ROUTED_PRODUCT: Operation[[Sequence[Matmul | Tensor], Tensor, Tensor, Tensor | None], Tensor]
ROUTED_PRODUCT = Operation(
    "product of experts",
    (native_routed_product, _lazy("kernels.triton.experts", "triton_routed_product"), _routed_product),
)
WEIGHTED_SUM: Operation[[Tensor, Tensor, Tensor], Tensor]
WEIGHTED_SUM = Operation(
    "weighted sum",
    (native_weighted_sum, _lazy("kernels.triton.experts", "triton_weighted_sum"), reference.weighted_sum),
)
ROW_WEIGHTS: Operation[[Tensor, Tensor], Tensor]
ROW_WEIGHTS = Operation("weights of rows", (native_weigh_rows, reference.weigh_rows))


def kernels() -> Iterator[Kernel]:
    """Yield the kernels for products of packed weights in order of preference."""
    yield from (CpuKernel(), TorchInt4Kernel())
    # Not loaded if an earlier one is chosen.
    from mycli.runtime.kernels.cpu.table import TableKernel

    yield TableKernel()
    from mycli.runtime.kernels.triton.product.kernel import TritonKernel

    yield from (TritonKernel(), reference.UnpackedKernel(), reference.DequantizeKernel())


def select_kernel(
    packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
) -> Kernel:
    """Return the first kernel that supports the packed product. Raises ModelError with all reasons if none does."""
    kernel, declined = find_kernel(packing, out_features, in_features, device, dtype)
    if kernel is not None:
        return kernel
    raise ModelError(
        f"no kernel multiplies {packing.name} weights [{out_features}, {in_features}] by {dtype} on {device}",
        code="all-kernels-declined",
        data={"declined": declined},
    )


def find_kernel(
    packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
) -> tuple[Kernel | None, dict[str, Declined]]:
    """Return the first kernel that supports the product, or None, and why each kernel before it declined, by name."""
    declined: dict[str, Declined] = {}
    for kernel in kernels():
        reason = kernel.decline(packing, out_features, in_features, device, dtype)
        if reason is None:
            return kernel, declined
        declined[kernel.name] = reason
    return None, declined


class _PermutedMatmul:
    """A product whose columns are stored in another order than its inputs; the inputs are gathered first."""

    def __init__(self, matmul: Matmul, inputs: Tensor) -> None:
        self._matmul, self._inputs = matmul, inputs

    @property
    def nbytes(self) -> int:
        return self._matmul.nbytes + self._inputs.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._matmul(x.index_select(1, self._inputs))

    def dequantize(self) -> Tensor:
        stored = self._matmul.dequantize()
        return torch.empty_like(stored).index_copy_(1, self._inputs.long(), stored)


def prepare_product(weight: PackedWeight, dtype: torch.dtype, reuse: Matmul | None = None) -> Matmul:
    """Convert `weight` to the layout of the first kernel that supports it for `dtype` activations. Raises ModelError.

    `reuse`: a product that is no longer needed, whose memory may be overwritten.
    """
    if isinstance(reuse, CpuMatmul) and weight.inputs is None and reuse.refill(weight):
        return reuse
    kernel = select_kernel(weight.packing, weight.out_features, weight.in_features, weight.packed.device, dtype)
    if weight.inputs is None:
        return kernel.prepare(weight, dtype)
    packing = replace(weight.packing, permuted=False)
    return _PermutedMatmul(kernel.prepare(replace(weight, packing=packing, inputs=None), dtype), weight.inputs)
