"""Parts of a layer on few rows of bf16 in one call each: the structures of layer.h, and the calls.

Knows addresses and shapes; which modules become which structure is decided in `runtime.layers.native`.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mycli.runtime.errors import ResourceError
from mycli.runtime.kernels.cpu.build import Native

MOST_PARTS = 3  # of a product


class CProduct(ctypes.Structure):
    """`Product` of layer.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("packed", "dense")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    ]


class CLinear(ctypes.Structure):
    """`Linear` of layer.h."""

    _fields_ = [("parts", CProduct * MOST_PARTS), ("count", c_int64), ("outputs", c_int64), ("bias", c_void_p)]


class CGain(ctypes.Structure):
    """`Gain` of layer.h."""

    _fields_ = [("gain", c_void_p), ("size", c_int64), ("eps", c_float), ("type", c_int32)]


class CSum(ctypes.Structure):
    """`Sum` of layer.h."""

    _fields_ = [("norm", CGain), ("scalar", c_void_p), ("hidden", c_int64), ("residual", c_float)]


class CAttentionPart(ctypes.Structure):
    """`AttentionPart` of layer.h."""

    _fields_ = [
        *((name, CGain) for name in ("norm", "q_norm", "k_norm", "v_norm")),
        *((name, CLinear) for name in ("qkv", "o")),
        ("sum", CSum),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "half", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("interleaved", "norms_rotated", "makes_keys", "makes_values")),
    ]


class CFeed(ctypes.Structure):
    """`Feed` of layer.h."""

    _fields_ = [("gate_up", CLinear), ("down", CLinear), ("size", c_int64), ("gate_type", c_int64)]


class CMlpPart(ctypes.Structure):
    """`MlpPart` of layer.h."""

    _fields_ = [("norm", CGain), ("feed", CFeed), ("sum", CSum)]


class CExpertProduct(ctypes.Structure):
    """`ExpertProduct` of experts_part.h; it holds the array that it is given."""

    _fields_ = [
        ("weights", ctypes.POINTER(c_void_p)),
        *((name, c_int64) for name in ("outputs", "inputs", "dense")),
    ]


class CExpertsPart(ctypes.Structure):
    """`ExpertsPart` of experts_part.h."""

    _fields_ = [
        *((name, CGain) for name in ("norm", "router_norm", "expert_norm", "expert_output_norm")),
        *((name, CGain) for name in ("shared_norm", "shared_output_norm")),
        *(("router", CLinear), ("gate_up", CExpertProduct), ("down", CExpertProduct)),
        *(("shared", CFeed), ("shared_gate", CLinear), ("sum", CSum), ("scales", c_void_p)),
        *((name, c_int64) for name in ("experts", "top", "size", "gate_type", "normalized")),
    ]


class CPassRows(ctypes.Structure):
    """`PassRows` of layer.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("starts", "lengths", "table")),
        *((name, c_int64) for name in ("rows", "sequences", "table_width")),
    ]


class CPlace(ctypes.Structure):
    """`Place` of layer.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "keys", "values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("blocks", "block_size", "block_stride", "head_stride", "cache_type")),
    ]


def run_attention(library: Native, part: CAttentionPart, rows: CPassRows, place: CPlace, x: Tensor) -> Tensor:
    """The stream x [..., hidden], bf16 and contiguous, through attention: keys and values go into the cache.

    Raises ValueError where lengths or blocks cannot be.
    """
    out = torch.empty_like(x)
    asked = ctypes.byref(part), ctypes.byref(rows), ctypes.byref(place), x.data_ptr(), out.data_ptr()
    failed = library.attention_part(*asked, torch.get_num_threads())
    if failed == 1:
        raise ResourceError("no memory for attention", code="less-context")
    if failed:
        raise ValueError("the lengths do not fit the blocks")
    return out


def run_mlp(library: Native, part: CMlpPart, x: Tensor) -> Tensor:
    """The stream x [..., hidden], bf16 and contiguous, through an MLP."""
    return _run(library.mlp_part, part, x)


def run_experts(library: Native, part: CExpertsPart, x: Tensor) -> Tensor:
    """The stream x [..., hidden], bf16 and contiguous, through a layer's experts."""
    return _run(library.experts_part, part, x)


def _run(function: Callable[..., int], part: CMlpPart | CExpertsPart, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    if function(ctypes.byref(part), rows, x.data_ptr(), out.data_ptr(), torch.get_num_threads()):
        raise ResourceError(f"no memory for the products of {rows} rows", code="less-context")
    return out
