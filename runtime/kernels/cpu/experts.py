"""Experts of MoE layers on the CPU in C++ (experts.h): routing, the products of all experts in one call, the sum.

The products share the arithmetic of `cpu.matmul`: the bits of a token-expert pair depend on no other pair. Each
function returns `Declined` for what it does not support.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mycli.runtime.device.placement import decline_dtype
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.elementwise import threads_for
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, pointer
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, PortableMatmul, dense_product, no_memory_error
from mycli.runtime.kernels.cpu.table import MAX_DECODED_ROWS, TableMatmul
from mycli.runtime.kernels.routed import Route
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul

PACKED_WEIGHTS, DENSE_WEIGHTS, TABLE_WEIGHTS, PORTABLE_WEIGHTS = range(4)  # `Stored` of experts.h
_NOT_CPU = Declined("cpu-without-gradient")
_ROWS = Declined("rows-not-whole-vectors", {"multiple": LANES})
_UNLIKE_PACKED = Declined("experts-not-packed-alike")
_UNLIKE_TABLES = Declined("experts-not-tables-alike")
_UNLIKE_DENSE = Declined("experts-not-dense-alike")
_FP32 = Declined("fp32-outside-inference")
_DENSE_TYPES = Declined("dense-experts-types")
_MANY_ROWS = Declined("many-rows-of-an-expert", {"rows": MAX_DECODED_ROWS})


# These structures mirror those of experts.h with the same names.
class _Routed(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weights", "starts", "tokens", "x", "y")),
        *((name, c_int64) for name in ("experts", "rows", "inputs", "outputs")),
        *((name, c_int32) for name in ("type", "stored")),
    ]


class CChoice(ctypes.Structure):
    _fields_ = [
        ("correction", c_void_p),
        *((name, c_int64) for name in ("top", "groups", "top_groups", "group_best")),
        *((name, c_float) for name in ("epsilon", "scale")),
        *((name, c_int32) for name in ("normalized", "sigmoid")),
    ]


def c_choice(choice: RoutingSpec, correction: Tensor | None) -> CChoice:
    """Return `choice` for C++; the caller keeps `correction` fp32 [experts] alive."""
    sizes = pointer(correction), choice.top_k, choice.groups, choice.top_groups, choice.group_best
    return CChoice(*sizes, choice.epsilon, choice.scale, choice.normalize, choice.scoring == "sigmoid")


class _Routing(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("scores", "weights", "chosen", "places", "pairs", "hit", "starts")),
        *((name, c_int64) for name in ("tokens", "experts")),
        ("choice", CChoice),
    ]


class _WeightedSum(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "places", "weights", "y")),
        *((name, c_int64) for name in ("tokens", "top", "size")),
        ("type", c_int32),
    ]


def decline_native_routing(choice: RoutingSpec) -> Declined | None:
    """Return why native code does not route by `choice`; None for softmax and sigmoids."""
    if choice.scoring not in ("softmax", "sigmoid"):
        return Declined("routing-kind", {"scoring": choice.scoring})
    return Declined("routing-kind", {"scoring": "softcapped"}) if choice.softcap else None


def native_route(scores: Tensor, choice: RoutingSpec, correction: Tensor | None = None) -> Route | Declined:
    """`reference.route`; among equal scores the lower index is chosen."""
    if scores.device.type != "cpu" or scores.requires_grad:
        return _NOT_CPU
    if (declined := decline_native_routing(choice)) is not None:
        return declined
    library = build.native()
    if isinstance(library, Declined):
        return library
    values = scores.float().contiguous()
    (tokens, experts), top_k = values.shape, choice.top_k
    weights = torch.empty(tokens, top_k)
    chosen, places = (torch.empty(tokens, top_k, dtype=torch.int32) for _ in range(2))
    pairs, hit = torch.empty(tokens * top_k, dtype=torch.int32), torch.empty(experts, dtype=torch.int32)
    starts = torch.empty(experts + 1, dtype=torch.int32)
    pointers = (tensor.data_ptr() for tensor in (values, weights, chosen, places, pairs, hit, starts))
    task = _Routing(*pointers, tokens, experts, c_choice(choice, correction))
    hits = library.experts_route(ctypes.byref(task), threads_for(tokens))
    return Route(hit[:hits].tolist(), starts[: hits + 1], pairs, places, weights)


def native_routed_product(
    weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None
) -> Tensor | Declined:
    """`reference.routed_product` for weights of one kind: packed, tables, `PortableMatmul`, or dense like x."""
    if x.device.type != "cpu" or x.requires_grad:
        return _NOT_CPU
    if isinstance(weights[0], Tensor) and x.dtype == torch.float32:
        return _in_turn(weights, x, starts, tokens)
    if isinstance(weights[0], Tensor):
        stored, operands = DENSE_WEIGHTS, _dense(weights, x.dtype)
    elif isinstance(weights[0], PortableMatmul):
        dense = [weight.dequantize() for weight in weights if isinstance(weight, PortableMatmul)]
        stored, operands = PORTABLE_WEIGHTS, _dense(dense, x.dtype) if len(dense) == len(weights) else _UNLIKE_DENSE
    elif isinstance(weights[0], TableMatmul):
        stored, operands = TABLE_WEIGHTS, _packed(weights, TableMatmul, x.dtype)
    else:
        stored, operands = PACKED_WEIGHTS, _packed(weights, CpuMatmul, x.dtype)
    if isinstance(operands, Declined):
        return operands
    if stored == TABLE_WEIGHTS and int(starts.diff().max()) > MAX_DECODED_ROWS:
        return _MANY_ROWS
    (outputs, inputs), addresses = operands
    library = build.native()
    if isinstance(library, Declined):
        return library
    assert x.shape[1] == inputs
    rows = (x.float() if x.dtype == torch.float16 else x).contiguous()
    pairs = len(rows) if tokens is None else len(tokens)
    y = torch.empty(pairs, outputs, dtype=rows.dtype)
    pointers = (c_void_p * len(addresses))(*addresses)
    task = _Routed(
        weights=ctypes.addressof(pointers),
        starts=starts.data_ptr(),
        tokens=pointer(tokens),
        x=rows.data_ptr(),
        y=y.data_ptr(),
        experts=len(addresses),
        rows=len(rows),
        inputs=inputs,
        outputs=outputs,
        type=ROW_TYPES[rows.dtype],
        stored=stored,
    )
    if library.experts_matmul(ctypes.byref(task), torch.get_num_threads()):
        raise no_memory_error(pairs, inputs)
    return y.to(x.dtype)


def _in_turn(weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor | Declined:
    # Unpacked fp32 experts are those of tests and small models: one call for each instead of a kernel of their own.
    # Calibration and evaluation run outside of inference mode and need torch's speed, not the bits of a row.
    if not torch.is_inference_mode_enabled():
        return _FP32
    bounds, parts = starts.tolist(), list[Tensor]()
    for weight, first, end in zip(weights, bounds, bounds[1:], strict=False):
        if first == end:
            continue
        rows = x[first:end] if tokens is None else x.index_select(0, tokens[first:end])
        part = dense_product(rows, weight) if isinstance(weight, Tensor) else _UNLIKE_DENSE
        if isinstance(part, Declined):
            return part
        parts.append(part)
    return torch.cat(parts)


_Operands = tuple[tuple[int, int], list[int]]  # outputs and inputs, and the address of each expert's weight


def _packed(
    weights: Sequence[Matmul | Tensor], kind: type[CpuMatmul | TableMatmul], dtype: torch.dtype
) -> _Operands | Declined:
    matmuls = [weight for weight in weights if isinstance(weight, kind)]
    if len(matmuls) < len(weights) or len({matmul.form for matmul in matmuls}) > 1:
        return _UNLIKE_TABLES if kind is TableMatmul else _UNLIKE_PACKED
    if dtype not in (*ROW_TYPES, torch.float16):
        return decline_dtype(dtype)
    return matmuls[0].shape, [matmul.address for matmul in matmuls]


def _dense(weights: Sequence[Matmul | Tensor], dtype: torch.dtype) -> _Operands | Declined:
    tensors = [weight for weight in weights if isinstance(weight, Tensor) and weight.is_contiguous()]
    if len(tensors) < len(weights) or len({(item.shape, item.dtype, item.requires_grad) for item in tensors}) > 1:
        return _UNLIKE_DENSE
    outputs, inputs = tensors[0].shape
    if {tensors[0].dtype, dtype} != {torch.bfloat16} or tensors[0].requires_grad:
        return _DENSE_TYPES
    return (outputs, inputs), [tensor.data_ptr() for tensor in tensors]


def native_weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor | Declined:
    if x.device.type != "cpu" or x.requires_grad or x.dtype not in ROW_TYPES:
        return _NOT_CPU
    tokens, top_k = places.shape
    if x.shape[1] % LANES:
        return _ROWS
    library = build.native()
    if isinstance(library, Declined):
        return library
    rows, y = x.contiguous(), x.new_empty(tokens, x.shape[1])
    pointers = rows.data_ptr(), places.data_ptr(), weights.data_ptr(), y.data_ptr()
    task = _WeightedSum(*pointers, tokens, top_k, x.shape[1], ROW_TYPES[x.dtype])
    library.experts_sum(ctypes.byref(task), threads_for(tokens))
    return y
