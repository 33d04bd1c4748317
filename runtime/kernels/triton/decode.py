"""The steps of a decoded token, one launch each: four products with what follows each of them, and attention.

Checks shapes and strides once and takes them for granted in the kernels (`triton.epilogues`, `triton.attention`).
Products are `triton_packed.TritonMatmul`; `Activation` passes from one to the next without a detour through the model's
dtype. Counters are shared by all launches of a stream: each leaves them as it found them, zero (`triton.split_k`).
Knows no layers. Nothing here reads a value back to the host, so all of it can be captured in a CUDA graph.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.kernels.triton.linear import Activation, Squares, TritonMatmul, uses_ptx
from mycli.runtime.kernels.triton.tiles import Chip

if TYPE_CHECKING:
    from mycli.runtime.kernels.triton.epilogues import Normed

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


def _contiguous(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")


@dataclass(frozen=True)
class Norm:
    """The RMSNorm before a product."""

    gain: Tensor
    eps: float
    product: TritonMatmul


def _rows(rows: int) -> int:
    """A power of two, at least `rows`."""
    return 1 << (rows - 1).bit_length()


def _normed(stream: Tensor, norm: Norm | None, block: int) -> tuple["Normed", int, Activation | None]:
    """Arguments of `add_tail` and `embed_kernel`, columns of a piece, and the operand they make."""
    from triton.language import constexpr

    from mycli.runtime.kernels.triton.activation import Operand
    from mycli.runtime.kernels.triton.epilogues import Normed

    rows, size = stream.shape
    if norm is None:
        plain = Operand(None, None, -(-size // block), 0, constexpr(block), constexpr(False))
        return Normed(stream, size, None, None, plain, constexpr(_rows(rows)), constexpr(1)), block, None
    into = norm.product.activation(rows)
    span = max(block, into.tile_k)
    sums = torch.empty((-(-size // span), rows), dtype=torch.float32, device=stream.device)
    into = replace(into, squares=Squares(sums, size, norm.eps))
    constants = constexpr(_rows(rows)), constexpr(span // into.tile_k)
    return Normed(stream, size, norm.gain, sums, into.operand(), *constants), span, into


def embed(tokens: Tensor, embedding: Tensor, norm: Norm) -> tuple[Tensor, Activation]:
    """The residual stream [rows, size] of tokens int64 [rows], and its norm as an operand."""
    from mycli.runtime.kernels.triton.epilogues import embed_kernel

    _contiguous(tokens, embedding, norm.gain)
    stream = embedding.new_empty((len(tokens), embedding.shape[1]))
    given, span, into = _normed(stream, norm, 128)
    assert into is not None
    early = norm.product.chip.overlap
    grid = (-(-stream.shape[1] // span),)
    embed_kernel[grid](tokens, embedding, len(tokens), given, OVERLAP=early, launch_pdl=early)
    return stream, into


def add(x: Activation, product: TritonMatmul, stream: Tensor, norm: Norm | None, counters: Tensor) -> Activation | None:
    """Adds the product to the residual stream [rows, size], in place; returns its norm as an operand.

    Without a norm, there is none. counters: int32 zeros, more than pieces of 128 rows of the weight; zeros afterwards.
    """
    from triton.language import constexpr

    from mycli.runtime.kernels.triton.epilogues import add_tail
    from mycli.runtime.kernels.triton.split_k import Tail

    _contiguous(stream, None if norm is None else norm.gain)
    given, span, into = _normed(stream, norm, x.tile.block_n)
    product.partial(x, tail=Tail(add_tail, counters, given, constexpr(span), constexpr(1)))
    return into


def activate(
    x: Activation, product: TritonMatmul, dtype: torch.dtype, following: TritonMatmul, counters: Tensor
) -> Activation:
    """SiLU(gate) * up of the product, gate first, as the operand of the one that follows. counters: as in `add`."""
    import triton.language as tl

    from mycli.runtime.kernels.triton.epilogues import Gated, silu_tail
    from mycli.runtime.kernels.triton.split_k import Tail

    rows = x.values.shape[0]
    into = following.activation(rows)
    span = max(x.tile.block_n, into.tile_k)
    constants = _rows(rows), span // into.tile_k, tl.bfloat16 if dtype is torch.bfloat16 else tl.float16
    given = Gated(product.n // 2, into.operand(), *(tl.constexpr(constant) for constant in constants))
    product.partial(x, tail=Tail(silu_tail, counters, given, tl.constexpr(span), tl.constexpr(2)))
    return into


@dataclass(frozen=True)
class Projection:
    """What a layer does to query and key before attention. Gains of the norms over a head, and the bias, if any."""

    heads: int
    bias: Tensor | None = None
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    eps: float = 0.0


def project(
    x: Activation,
    product: TritonMatmul,
    projection: Projection,
    tables: tuple[Tensor, Tensor],
    lengths: Tensor,
    cache: LayerCache,
    dtype: torch.dtype,
    counters: Tensor,
) -> Tensor:
    """Queries [sequences, tokens, heads, head_dim], rotated; keys and values go to the end of the cache.

    product: of (heads + 2 * kv_heads) * head_dim rows; tables: cosines and sines [positions, head_dim / 2];
    lengths: int32 [sequences], the keys present once the new tokens are; counters: int32 zeros, one a head at least.
    """
    import triton
    from triton.language import constexpr

    from mycli.runtime.kernels.triton.epilogues import Rotated, rope_tail
    from mycli.runtime.kernels.triton.split_k import Tail

    _contiguous(*tables, lengths, projection.bias)
    (sequences, kv_heads, capacity, head_dim), rows = cache.keys.shape, x.values.shape[0]
    heads, half = projection.heads, head_dim // 2
    if product.n != (heads + 2 * kv_heads) * head_dim or rows % sequences or tables[0].shape[1] != half:
        raise ValueError(f"{product.n} rows, tables {tuple(tables[0].shape)}, cache {tuple(cache.keys.shape)}")
    query = torch.empty((sequences, rows // sequences, heads, head_dim), dtype=dtype, device=lengths.device)
    given = Rotated(
        projection.bias, projection.query_gain, projection.key_gain, tables[0], tables[1], lengths, query,
        cache.keys, cache.values, cache.key_scales, cache.value_scales,
        rows // sequences, heads, kv_heads, cache.keys.stride(0), cache.keys.stride(1), capacity, projection.eps,
        constexpr(half), constexpr(triton.next_power_of_2(half)), constexpr(_rows(rows)),
    )  # fmt: skip
    product.partial(x, tail=Tail(rope_tail, counters, given, constexpr(head_dim), constexpr(1)))
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

    from mycli.runtime.kernels.triton.attention import attend_kernel

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
        query, cache.keys, cache.values, cache.key_scales, cache.value_scales, lengths, outputs, stats,
        *cache.keys.stride()[:2], capacity, window or 0, head_dim**-0.5 * math.log2(math.e), counters, into.operand(),
        TOKENS=tokens, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_Q=block_q,
        BLOCK_K=BLOCK_K, WINDOW=window is not None, DOT=dot,
        **combination(tokens, group * head_dim, into.tile_k, parts, attend_warps(block_q)),
        OVERLAP=product.chip.overlap, launch_pdl=product.chip.overlap,
        num_warps=attend_warps(block_q), num_stages=3,
    )  # fmt: skip
    return into
