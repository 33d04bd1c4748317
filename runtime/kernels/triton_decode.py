"""The steps of a decoded token between its products, launched on tensors: norm, rotation, attention, activation.

Checks shapes and strides once and takes them for granted in the kernels (`triton_fused`, `triton_attention`). Products
are `triton_packed.TritonMatmul`; `Activation` passes from one to the next without a detour through the model's dtype.
Knows no layers. Nothing here reads a value back to the host, so all of it can be captured in a CUDA graph.
"""

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from mycli.runtime.kernels.triton_packed import Activation, TritonMatmul, uses_ptx
from mycli.runtime.kernels.triton_tiles import Chip

BLOCK_K = 64  # keys of one turn of the attention loop
_MOST_SPLITS = 64


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache, [sequences, kv_heads, capacity, head_dim]; int8 with scales fp32 [.., capacity] per token.

    The last two axes are contiguous, keys and values lie alike; x = code * scale.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        capacity, head_dim = self.keys.shape[2:]
        if self.keys.stride() != self.values.stride() or self.keys.stride()[2:] != (head_dim, 1):
            raise ValueError(f"cache strides {self.keys.stride()} and {self.values.stride()}")
        if (self.keys.dtype is torch.int8) != (self.key_scales is not None and self.value_scales is not None):
            raise ValueError("an int8 cache, and no other, has scales")
        for scales in (self.key_scales, self.value_scales):
            if scales is not None and (scales.shape != self.keys.shape[:3] or not scales.is_contiguous()):
                raise ValueError(f"cache scales {tuple(scales.shape)} for a capacity of {capacity}")

    def scales(self) -> tuple[Tensor, Tensor]:
        """Of keys and values; a placeholder that no kernel reads where there are none."""
        return self.keys if self.key_scales is None else self.key_scales, (
            self.values if self.value_scales is None else self.value_scales
        )


def _contiguous(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")


@overload
def add_norm(
    parts: Tensor | None, residual: Tensor, gain: Tensor, eps: float, product: TritonMatmul
) -> tuple[Tensor, Activation]: ...


@overload
def add_norm(
    parts: Tensor | None, residual: Tensor, gain: Tensor, eps: float, product: None
) -> tuple[Tensor, Tensor]: ...


def add_norm(
    parts: Tensor | None, residual: Tensor, gain: Tensor, eps: float, product: TritonMatmul | None
) -> tuple[Tensor, Activation | Tensor]:
    """(residual + sum of parts, its RMSNorm) for residual [rows, size] and parts fp32 [count, rows, size] or None.

    The norm is the operand of `product`, or a tensor in the residual's dtype where there is none.
    """
    import triton

    from mycli.runtime.kernels.triton_fused import norm_kernel

    _contiguous(parts, residual, gain)
    rows, size = residual.shape
    stream = residual if parts is None else torch.empty_like(residual)
    into = None if product is None else product.activation(rows)
    normed = torch.empty_like(residual) if into is None else residual
    norm_kernel[(rows,)](
        residual if parts is None else parts, residual, gain, stream, normed,
        None if into is None else into.operand(), 0 if parts is None else parts.shape[0], rows, size, eps,
        BLOCK=max(128, triton.next_power_of_2(size)), ADD=parts is not None, num_warps=8 if size > 2048 else 4,
    )  # fmt: skip
    return stream, normed if into is None else into


def silu_multiply(parts: Tensor, dtype: torch.dtype, product: TritonMatmul) -> Activation:
    """SiLU(gate) * up as the operand of `product`, from parts fp32 [count, rows, 2 * size], gate first."""
    import triton.language as tl

    from mycli.runtime.kernels.triton_fused import silu_kernel

    _contiguous(parts)
    count, rows, width = parts.shape
    into = product.activation(rows)
    at_once = 512 // into.tile_k
    silu_kernel[(rows, -(-into.tiles // at_once))](
        parts, into.operand(), count, rows, width // 2,
        DTYPE=tl.bfloat16 if dtype is torch.bfloat16 else tl.float16, TILES=at_once,
    )  # fmt: skip
    return into


@dataclass(frozen=True)
class Projection:
    """What a layer does to query and key before attention. Gains of the norms over a head, and the bias, if any."""

    heads: int
    bias: Tensor | None = None
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    eps: float = 0.0


def rotate_and_store(
    parts: Tensor,
    projection: Projection,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    cache: LayerCache,
    dtype: torch.dtype,
) -> Tensor:
    """Queries [sequences, tokens, heads, head_dim], rotated; keys and values go to the end of the cache.

    parts: fp32 [count, sequences * tokens, (heads + 2 * kv_heads) * head_dim]; cos, sin: [positions, head_dim / 2];
    lengths: int32 [sequences], the keys present once the new tokens are.
    """
    import triton

    from mycli.runtime.kernels.triton_fused import rope_kernel

    _contiguous(parts, cos, sin, lengths, projection.bias)
    (sequences, kv_heads, capacity, head_dim), (count, rows, width) = cache.keys.shape, parts.shape
    heads = projection.heads
    if width != (heads + 2 * kv_heads) * head_dim or rows % sequences or cos.shape[1] * 2 != head_dim:
        raise ValueError(f"parts {tuple(parts.shape)}, tables {tuple(cos.shape)}, cache {tuple(cache.keys.shape)}")
    query = torch.empty((sequences, rows // sequences, heads, head_dim), dtype=dtype, device=parts.device)
    gains = (projection.query_gain, projection.key_gain)
    rope_kernel[(rows, heads + 2 * kv_heads)](
        parts, query if projection.bias is None else projection.bias,
        *(query if gain is None else gain for gain in gains), cos, sin, lengths,
        query, cache.keys, cache.values, *cache.scales(),
        count, rows, rows // sequences, heads, kv_heads, *cache.keys.stride()[:2], capacity, projection.eps,
        HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2), BIAS=projection.bias is not None,
        NORM=projection.query_gain is not None, INT8=cache.key_scales is not None, num_warps=1,
    )  # fmt: skip
    return query


def splits(chip: Chip, programs: int, capacity: int) -> int:
    """Into how many parts the keys are split: two programs for each multiprocessor, of four turns or more.

    Depends on the capacity alone, so that it does not change while a sequence grows.
    """
    wanted = max(1, 2 * chip.processors // programs)
    return min(_MOST_SPLITS, wanted, max(1, capacity // (4 * BLOCK_K)))


def combination(tokens: int, columns: int, tile_k: int, parts: int, warps: int) -> dict[str, int]:
    """How the last split combines all: constants of `attend_kernel`. columns: of the heads that share a key-value head.

    A thread has 4 columns, where there are as many, of up to 8 splits at a time; of 4 where more would cost the loop of
    the kernel its second block on a multiprocessor.
    """
    rows, unit = 1 << (tokens - 1).bit_length(), tile_k // math.gcd(tile_k, columns)
    tiles = min(1 << (unit * columns // tile_k - 1).bit_length(), max(1, 128 * warps // (rows * tile_k)))
    return {"UNIT": unit, "ROWS": rows, "TILES": tiles, "SPLITS": min(32 // warps, 1 << (parts - 1).bit_length())}


def attend_warps(block_q: int) -> int:
    """Of one program: more than 16 queries in 4 warps would not stay in registers."""
    return 4 if block_q <= 16 else 8


def attend(
    query: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    window: int | None,
    product: TritonMatmul,
    counters: Tensor,
) -> Activation:
    """query [sequences, tokens, heads, head_dim], the last positions of the cache, attends to what it may see.

    Returns the operand of `product`. At most 64 pairs of token and head may share a key-value head. counters: int32
    zeros, at least sequences * kv_heads; they are zero again afterwards.
    """
    import triton
    import triton.language as tl

    from mycli.runtime.kernels.triton_attention import attend_kernel

    _contiguous(query, lengths)
    sequences, tokens, heads, head_dim = query.shape
    kv_heads, capacity = cache.keys.shape[1:3]
    group = heads // kv_heads
    block_q = max(8, triton.next_power_of_2(tokens * group))
    if block_q > 64:
        raise ValueError(f"{tokens} tokens of {group} heads: more than 64 queries to a key")
    parts = splits(product.chip, sequences * kv_heads, capacity)
    dot = tl.float16
    if query.dtype is torch.bfloat16:
        dot = tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter multiplies the bits of bf16 as integers
    shape = (sequences, kv_heads, parts, block_q)
    outputs = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    into = product.activation(sequences * tokens)
    attend_kernel[(parts, kv_heads, sequences)](
        query, cache.keys, cache.values, *cache.scales(), lengths, outputs, stats,
        *cache.keys.stride()[:2], capacity, window or 0, head_dim**-0.5 * math.log2(math.e), counters, into.operand(),
        TOKENS=tokens, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_Q=block_q,
        BLOCK_K=BLOCK_K, WINDOW=window is not None, INT8=cache.key_scales is not None, DOT=dot,
        **combination(tokens, group * head_dim, into.tile_k, parts, attend_warps(block_q)),
        num_warps=attend_warps(block_q), num_stages=3,
    )  # fmt: skip
    return into
