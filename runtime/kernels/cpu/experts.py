"""Experts on the CPU by our own code: which tokens go to which, the products of all experts in one call, the sum.

The products are those of `cpu.matmul` and share their arithmetic. For a token alone all threads read the weights of its
experts at once, no others; experts with many rows are multiplied one after the other. A pair's bits depend on
neither the pairs beside it nor their number. Each function returns the reason where this code cannot.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.elementwise import threads_for
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES
from mycli.runtime.kernels.cpu.matmul import DENSE_INPUTS, CpuMatmul, no_room_for
from mycli.runtime.kernels.cpu.table import MOST_DECODED, TableMatmul
from mycli.runtime.kernels.routed import Route
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul

PACKED_WEIGHTS, DENSE_WEIGHTS, TABLE_WEIGHTS = range(3)  # `Stored` of experts.h
_NOT_CPU = Declined("cpu-without-gradient")
_ROWS = Declined("rows-not-whole-vectors", {"multiple": LANES})
_UNLIKE_PACKED = Declined("experts-not-packed-alike")
_UNLIKE_TABLES = Declined("experts-not-tables-alike")
_UNLIKE_DENSE = Declined("experts-not-dense-alike")
_DENSE_TYPES = Declined("dense-experts-types", {"multiple": DENSE_INPUTS})
_MANY_ROWS = Declined("many-rows-of-an-expert", {"rows": MOST_DECODED})


class _Routed(ctypes.Structure):
    """`Routed` of experts.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "starts", "tokens", "x", "y")),
        *((name, c_int64) for name in ("experts", "rows", "inputs", "outputs")),
        *((name, c_int32) for name in ("type", "stored")),
    ]


class CChoice(ctypes.Structure):
    """`Choice` of experts.h."""

    _fields_ = [
        ("correction", c_void_p),
        *((name, c_int64) for name in ("top", "groups", "top_groups")),
        *((name, c_float) for name in ("margin", "scale")),
        *((name, c_int32) for name in ("normalized", "sigmoid")),
    ]


def c_choice(choice: RoutingSpec, correction: Tensor | None) -> CChoice:
    """As native code has it; it does not hold the `correction` fp32 [experts]."""
    address = None if correction is None else correction.data_ptr()
    sizes = choice.top_k, choice.groups, choice.top_groups
    return CChoice(address, *sizes, choice.epsilon, choice.scale, choice.normalize, choice.scoring == "sigmoid")


class _Routing(ctypes.Structure):
    """`Routing` of experts.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("scores", "weights", "chosen", "places", "pairs", "hit", "starts")),
        *((name, c_int64) for name in ("tokens", "experts")),
        ("choice", CChoice),
    ]


class _WeightedSum(ctypes.Structure):
    """`WeightedSum` of experts.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "places", "weights", "y")),
        *((name, c_int64) for name in ("tokens", "top", "size")),
        ("type", c_int32),
    ]


def native_route(scores: Tensor, choice: RoutingSpec, correction: Tensor | None = None) -> Route | Declined:
    """As `reference.route`; of equal values the first is higher."""
    if scores.device.type != "cpu" or scores.requires_grad:
        return _NOT_CPU
    library = build.native()
    if isinstance(library, Declined):
        return library
    given = scores.float().contiguous()
    (tokens, experts), top_k = given.shape, choice.top_k
    weights = torch.empty(tokens, top_k)
    chosen, places = (torch.empty(tokens, top_k, dtype=torch.int32) for _ in range(2))
    pairs, hit = torch.empty(tokens * top_k, dtype=torch.int32), torch.empty(experts, dtype=torch.int32)
    starts = torch.empty(experts + 1, dtype=torch.int32)
    pointers = (tensor.data_ptr() for tensor in (given, weights, chosen, places, pairs, hit, starts))
    task = _Routing(*pointers, tokens, experts, c_choice(choice, correction))
    hits = library.experts_route(ctypes.byref(task), threads_for(tokens))
    return Route(hit[:hits].tolist(), starts[: hits + 1], pairs, places, weights)


def native_routed_product(
    weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None
) -> Tensor | Declined:
    """As `reference.routed_product`, where all weights are alike: packed for this code, of tables, or bf16 like x."""
    if x.device.type != "cpu" or x.requires_grad:
        return _NOT_CPU
    if isinstance(weights[0], Tensor):
        stored, alike = DENSE_WEIGHTS, _dense(weights, x.dtype)
    elif isinstance(weights[0], TableMatmul):
        stored, alike = TABLE_WEIGHTS, _tables(weights, x.dtype, starts)
    else:
        stored, alike = PACKED_WEIGHTS, _packed(weights, x.dtype)
    if isinstance(alike, Declined):
        return alike
    (outputs, inputs), addresses = alike
    library = build.native()
    if isinstance(library, Declined):
        return library
    assert x.shape[1] == inputs
    given = (x.float() if x.dtype == torch.float16 else x).contiguous()
    pairs = len(given) if tokens is None else len(tokens)
    y = torch.empty(pairs, outputs, dtype=given.dtype)
    pointers = (c_void_p * len(addresses))(*addresses)
    task = _Routed(
        weights=ctypes.addressof(pointers),
        starts=starts.data_ptr(),
        tokens=None if tokens is None else tokens.data_ptr(),
        x=given.data_ptr(),
        y=y.data_ptr(),
        experts=len(addresses),
        rows=len(given),
        inputs=inputs,
        outputs=outputs,
        type=ROW_TYPES[given.dtype],
        stored=stored,
    )
    if library.experts_matmul(ctypes.byref(task), torch.get_num_threads()):
        raise no_room_for(pairs, inputs)
    return y.to(x.dtype)


_Alike = tuple[tuple[int, int], list[int]]  # outputs and inputs, and the address of each expert's weight


def _packed(weights: Sequence[Matmul | Tensor], dtype: torch.dtype) -> _Alike | Declined:
    found = [weight for weight in weights if isinstance(weight, CpuMatmul)]
    if len(found) < len(weights) or len({weight.form for weight in found}) > 1:
        return _UNLIKE_PACKED
    if dtype not in (*ROW_TYPES, torch.float16):
        return Declined("activation-dtype", {"dtype": dtype})
    return found[0].form[:2], [weight.address for weight in found]


def _tables(weights: Sequence[Matmul | Tensor], dtype: torch.dtype, starts: Tensor) -> _Alike | Declined:
    found = [weight for weight in weights if isinstance(weight, TableMatmul)]
    if len(found) < len(weights) or len({weight.form for weight in found}) > 1:
        return _UNLIKE_TABLES
    if dtype not in (*ROW_TYPES, torch.float16):
        return Declined("activation-dtype", {"dtype": dtype})
    if int(starts.diff().max()) > MOST_DECODED:
        return _MANY_ROWS
    return found[0].shape, [weight.address for weight in found]


def _dense(weights: Sequence[Matmul | Tensor], dtype: torch.dtype) -> _Alike | Declined:
    found = [weight for weight in weights if isinstance(weight, Tensor) and weight.is_contiguous()]
    if len(found) < len(weights) or len({(weight.shape, weight.dtype, weight.requires_grad) for weight in found}) > 1:
        return _UNLIKE_DENSE
    outputs, inputs = found[0].shape
    if {found[0].dtype, dtype} != {torch.bfloat16} or inputs % DENSE_INPUTS or found[0].requires_grad:
        return _DENSE_TYPES
    return (outputs, inputs), [weight.data_ptr() for weight in found]


def native_weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor | Declined:
    """As `reference.weighted_sum`; a token's bits depend on no other token."""
    if x.device.type != "cpu" or x.requires_grad or x.dtype not in ROW_TYPES:
        return _NOT_CPU
    tokens, top_k = places.shape
    if x.shape[1] % LANES:
        return _ROWS
    library = build.native()
    if isinstance(library, Declined):
        return library
    given, y = x.contiguous(), x.new_empty(tokens, x.shape[1])
    pointers = given.data_ptr(), places.data_ptr(), weights.data_ptr(), y.data_ptr()
    task = _WeightedSum(*pointers, tokens, top_k, x.shape[1], ROW_TYPES[x.dtype])
    library.experts_sum(ctypes.byref(task), threads_for(tokens))
    return y
