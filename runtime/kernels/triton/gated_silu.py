"""SiLU(gate) * up or GELU(gate) * up of a gate_up product, written as the operand of the next product."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.kernels.triton.product.activation import columns_of, some_tiles, store_activation
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous, launch_epilogue
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
    bias: Any = None  # [2 * size]


@triton.jit
def silu_epilogue(parts, count, piece, row, rows, args):
    """Write SiLU(gate) * up or GELU(gate) * up of parts [count, rows, 2 * size], gate first."""
    row, tile = some_tiles(row, piece * args.TILES, args.ROWS, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    place, stride = row[:, None] * (2 * args.size) + column, rows * args.size * 2
    # A product this wide has few parts: more than two loads in flight would spill registers.
    gate = add_parts(parts, place, count, stride, inside, 2).to(args.DTYPE).to(tl.float32)
    up = add_parts(parts, place + args.size, count, stride, inside, 2).to(args.DTYPE).to(tl.float32)
    if args.bias is not None:
        gate += tl.load(args.bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(args.bias + args.size + column, mask=inside, other=0.0).to(tl.float32)
        gate, up = gate.to(args.DTYPE).to(tl.float32), up.to(args.DTYPE).to(tl.float32)
    slope = gate  # gate * sigmoid(slope)
    if args.GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-slope))).to(args.DTYPE).to(tl.float32)
    value = (active * up).to(args.DTYPE).to(tl.float32)
    store_activation(value, row, tile, (row < rows) & (tile < args.into.tiles), args.into)


def activate(
    x: Activation,
    product: TritonMatmul,
    dtype: torch.dtype,
    following: TritonMatmul,
    counters: Tensor,
    gelu: bool = False,
    bias: Tensor | None = None,
) -> Activation:
    """Return SiLU(gate) * up, or GELU, of the product as the operand of `following`; counters as in `residual.add`."""
    check_contiguous(bias)
    rows = x.values.shape[0]
    into = following.activation(rows)
    span = max(x.tile.block_n, into.tile_k)
    epilogue = _epilogue(into, product.n // 2, x.tile.rows_at_once(rows), span, dtype, gelu, bias)
    product.partial(x, epilogue=epilogue._replace(counters=counters), next_first=True)
    return into


def activate_parts(parts: Tensor, dtype: torch.dtype, following: TritonMatmul, tile: Tile) -> Activation:
    """Return SiLU(gate) * up of split-K parts fp32 [count, rows, 2 * size] as an operand of `following`."""
    check_contiguous(parts)
    _, rows, width = parts.shape
    into = following.activation(rows, tile)
    launch_epilogue(parts, _epilogue(into, width // 2, 1, max(_SPAN, into.tile_k), dtype), following.chip.pdl)
    return into


def _epilogue(
    into: Activation,
    size: int,
    rows: int,
    span: int,
    dtype: torch.dtype,
    gelu: bool = False,
    bias: Tensor | None = None,
) -> Epilogue:
    model_dtype = tl.bfloat16 if dtype is torch.bfloat16 else tl.float16
    tiles = constexpr(span // into.tile_k)
    constants = constexpr(rows), tiles, constexpr(model_dtype), constexpr(gelu)
    args = SiluArguments(size, into.operand(), *constants, bias)
    return Epilogue(silu_epilogue, None, args, constexpr(span), constexpr(2))
