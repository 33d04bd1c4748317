"""Latent attention over the cache and products by heads on the CPU in C++ (attention/latent.h, products/heads.h)."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined, ResourceError
from mycli.runtime.kernels.cpu.attention import CACHE_TYPES
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, pointer
from mycli.runtime.kernels.paged import Ragged

_NOT_CPU = Declined("tensors-not-on-cpu")
_INDICES = Declined("indices-not-int32")
_TYPES = Declined("attention-types")
_SIZES = Declined("latent-sizes", {"multiple": LANES})
_LAYOUT = Declined("cache-layout")
_GRADIENT = Declined("no-gradient")
_PRODUCT_TYPES = Declined("dense-product-types")
_PRODUCT_LAYOUT = Declined("dense-weight-layout")


# These structures mirror those of latent.h and heads.h with the same names.
class _LatentTask(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "rotated_query", "latents", "rotated")),
        *((name, c_void_p) for name in ("latent_scales", "rotated_scales", "out", "starts", "lengths", "table")),
        *((name, c_int64) for name in ("sequences", "table_width", "blocks", "block_size", "heads", "rank", "rope")),
        ("scale", c_float),
        *((name, c_int32) for name in ("query_type", "cache_type", "out_type", "portable")),
    ]


class _HeadProduct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "y")),
        *((name, c_int64) for name in ("tokens", "heads", "inputs", "outputs", "token_stride", "head_stride")),
        *((name, c_int32) for name in ("type", "portable")),
    ]


def decline_latent(rank: int, rope_dim: int) -> Declined | None:
    """Return why whole layers and int4 caches do not support latents and rotated values of these sizes, or None."""
    return _SIZES if rank % LANES or rope_dim % LANES else None


def native_latent_attention(
    query: Tensor, rotated_query: Tensor, latents: Stored, rotated: Stored, ragged: Ragged, scale: float
) -> Tensor | Declined:
    """`attend_latent` for bf16 or fp32 queries and contiguous caches."""
    # Sums are those of `cpu.attention`: a row's bits depend on neither the other rows nor how the prompt was split.
    indices = ragged.starts, ragged.lengths, ragged.block_table
    if not query.is_cpu or not latents.data.is_cpu:
        return _NOT_CPU
    if any(tensor.dtype != torch.int32 or not tensor.is_cpu or not tensor.is_contiguous() for tensor in indices):
        return _INDICES
    if torch.is_grad_enabled() and query.requires_grad:
        return _GRADIENT
    tokens, heads, rank = query.shape
    rope, data = rotated_query.shape[2], latents.data
    if query.dtype not in ROW_TYPES or data.dtype not in CACHE_TYPES:
        return _TYPES
    if data.dtype == PACKED and (declined := decline_latent(rank, rope)) is not None:
        return declined
    for stored, size in ((latents, rank), (rotated, rope)):
        expected = size // 2 if data.dtype == PACKED else size
        if stored.data.shape[3] != expected:
            return Declined("cache-vector-size", {"expected": expected, "size": stored.data.shape[3]})
    tensors = (latents.data, rotated.data, latents.scales, rotated.scales)
    if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return _LAYOUT
    library = build.native()
    if isinstance(library, Declined):
        return library
    query, rotated_query = query.contiguous(), rotated_query.contiguous()
    out = torch.empty_like(query)
    pointers = map(pointer, (query, rotated_query, *tensors, out))
    task = _LatentTask(
        *pointers,
        *(tensor.data_ptr() for tensor in indices),
        len(ragged.lengths),
        ragged.block_table.shape[1],
        data.shape[0],
        data.shape[2],
        heads,
        rank,
        rope,
        scale,
        ROW_TYPES[query.dtype],
        CACHE_TYPES[data.dtype],
        ROW_TYPES[query.dtype],
        ragged.portable,
    )
    status = library.attend_latent(ctypes.byref(task), torch.get_num_threads())
    if status == 1:
        raise ResourceError("no memory for attention", code="less-context")
    if status:
        raise ValueError(f"lengths {ragged.lengths.tolist()} do not fit blocks {ragged.block_table.tolist()}")
    return out


def native_head_product(x: Tensor, weight: Tensor, *, portable: bool = False) -> Tensor | Declined:
    """`reference.head_product` for bf16 or fp32; `portable`: with the same bits on every processor."""
    heads, outputs, inputs = weight.shape
    if x.dtype not in ROW_TYPES or weight.dtype != x.dtype or not x.is_cpu:
        return _PRODUCT_TYPES
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _GRADIENT
    if not weight.is_contiguous() or x.stride(2) != 1:
        return _PRODUCT_LAYOUT
    library = build.native()
    if isinstance(library, Declined):
        return library
    y = x.new_empty(len(x), heads, outputs)
    pointers = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    strides = x.stride(0), x.stride(1)
    task = _HeadProduct(*pointers, len(x), heads, inputs, outputs, *strides, ROW_TYPES[x.dtype], portable)
    if library.head_product(ctypes.byref(task), torch.get_num_threads()):
        raise ResourceError(f"no memory for {len(x)} rows of {heads} heads", code="less-context")
    return y
