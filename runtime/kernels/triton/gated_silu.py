"""SiLU(gate) * up, or another gated activation, of a gate_up product, written as the operand of the next product."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.kernels.triton.product.activation import columns_of, some_tiles, store_activation
from mycli.runtime.kernels.triton.product.grouped import owner_of
from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, check_contiguous, launch_epilogue
from mycli.runtime.kernels.triton.product.tiles import Tile
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts

# Values are rounded to the model's dtype where the plain pass rounds them.

_SPAN = 128  # columns of a piece of parts that are there already


class SiluArguments(NamedTuple):
    """The epilogue's arguments."""

    size: Any  # columns of gate, and of up
    into: Any  # `Operand`
    ROWS: Any  # rows at a time
    TILES: Any  # tiles of a piece
    DTYPE: Any  # the model's
    GELU: Any  # by the tanh approximation; otherwise SiLU
    bias: Any = None  # [2 * size], or of each expert: [experts, 2 * size]
    starts: Any = None  # int32 [experts + 1], of rows that are pairs sorted by expert; one row at a time
    experts: Any = 0
    EXPERTS: Any = 1  # a power of two, at least `experts`
    CLAMPED: Any = False  # `reference.clamped_swiglu`
    ALTERNATING: Any = False  # columns of gate and up alternate; otherwise gate is first


@triton.jit
def silu_epilogue(parts, count, piece, first, rows, args):
    """Write the gated activation of parts [count, rows, 2 * size]."""
    row, tile = some_tiles(first, piece * args.TILES, args.ROWS, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    up_offset = args.size
    if args.ALTERNATING:
        column, up_offset = 2 * column, 1
    place, stride = row[:, None] * (2 * args.size) + column, rows * args.size * 2
    # A product this wide has few parts: more than two loads in flight would spill registers.
    gate = add_parts(parts, place, count, stride, inside, 2).to(args.DTYPE).to(tl.float32)
    up = add_parts(parts, place + up_offset, count, stride, inside, 2).to(args.DTYPE).to(tl.float32)
    if args.bias is not None:
        bias = args.bias
        if args.starts is not None:
            bias += owner_of(first, args.starts, args.experts, args.EXPERTS) * (2 * args.size)
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + up_offset + column, mask=inside, other=0.0).to(tl.float32)
        gate, up = gate.to(args.DTYPE).to(tl.float32), up.to(args.DTYPE).to(tl.float32)
    if args.CLAMPED:
        gate, up = tl.minimum(gate, 7.0), tl.maximum(tl.minimum(up, 7.0), -7.0)
        slope = (gate * 1.702).to(args.DTYPE).to(tl.float32)
        share = (1.0 / (1.0 + tl.exp(-slope))).to(args.DTYPE).to(tl.float32)
        active, up = (gate * share).to(args.DTYPE).to(tl.float32), (up + 1.0).to(args.DTYPE).to(tl.float32)
    else:
        slope = gate  # gate * sigmoid(slope)
        if args.GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = (gate / (1.0 + tl.exp(-slope))).to(args.DTYPE).to(tl.float32)
    value = (active * up).to(args.DTYPE).to(tl.float32)
    store_activation(value, row, tile, (row < rows) & (tile < args.into.tiles), args.into)


@dataclass(frozen=True)
class GatedActivation:
    """SiLU(gate) * up, or with GELU or clamped; see `SiluArguments`. bias: in the order of the product's columns."""

    gelu: bool = False
    clamped: bool = False
    alternating: bool = False
    bias: Tensor | None = None


PLAIN_SILU = GatedActivation()


def activate(
    x: Activation,
    product: FewRowsProduct,
    dtype: torch.dtype,
    following: FewRowsProduct,
    counters: Tensor,
    kind: GatedActivation = PLAIN_SILU,
) -> Activation:
    """Return the activation of the product as the operand of `following`; counters as in `residual.add`."""
    rows = x.values.shape[0]
    into = following.activation(rows)
    span = max(x.tile.block_n, into.tile_k)
    epilogue = _epilogue(into, product.n // 2, x.tile.rows_at_once(rows), span, dtype, kind)
    product.partial(x, epilogue=epilogue._replace(counters=counters), next_first=True)
    return into


def activate_parts(
    parts: Tensor,
    dtype: torch.dtype,
    following: FewRowsProduct,
    tile: Tile,
    kind: GatedActivation = PLAIN_SILU,
    starts: Tensor | None = None,
) -> Activation:
    """Return the activation of split-K parts fp32 [count, rows, 2 * size] as an operand of `following`.

    starts: int32 [experts + 1], the rows of each expert, for biases [experts, 2 * size] of `kind`.
    """
    check_contiguous(parts)
    _, rows, width = parts.shape
    into = following.activation(rows, tile)
    epilogue = _epilogue(into, width // 2, 1, max(_SPAN, into.tile_k), dtype, kind, starts)
    launch_epilogue(parts, epilogue, following.chip.pdl)
    return into


def _epilogue(
    into: Activation,
    size: int,
    rows: int,
    span: int,
    dtype: torch.dtype,
    kind: GatedActivation,
    starts: Tensor | None = None,
) -> Epilogue:
    check_contiguous(kind.bias, starts)
    if kind.bias is None:
        starts = None
    experts = 0 if kind.bias is None or starts is None else len(kind.bias)
    args = SiluArguments(
        size,
        into.operand(),
        constexpr(rows),
        constexpr(span // into.tile_k),
        constexpr(tl.bfloat16 if dtype is torch.bfloat16 else tl.float16),
        constexpr(kind.gelu),
        kind.bias,
        starts,
        experts,
        constexpr(triton.next_power_of_2(max(1, experts))),
        constexpr(kind.clamped),
        constexpr(kind.alternating),
    )
    return Epilogue(silu_epilogue, None, args, constexpr(span), constexpr(2))
