"""Finds the expert and the rows of a program in a grouped product, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl

# (token, expert) pairs are sorted by expert and each expert's pairs are cut into tiles of rows. The grid has as many
# tiles as any routing can need (`RoutedRows.max_tiles`) and each program finds its own on the device, so neither the
# number of launches nor the host depends on the routing.


class Routed(NamedTuple):
    """Weights of experts and the pairs routed to them, as arguments of a product; see `matmul.RoutedRows`."""

    codes: Any  # int64 [experts]: distance from the first expert's codes, in units of 16 bytes
    scales: Any  # int64 [experts]: likewise; None for weights in 16 bits
    offsets: Any  # int64 [experts] or None: likewise
    starts: Any  # int32 [experts + 1]: the pairs of expert e are starts[e] to starts[e + 1]
    tokens: Any  # int32 [pairs], the row of x that each reads; None: its own
    experts: Any
    EXPERTS: Any  # a power of two, at least `experts`


@triton.jit
def expert_tile(routed, BLOCK_M: tl.constexpr):
    """Return (expert, pairs [BLOCK_M], rows of x [BLOCK_M], end of the expert's pairs) of tile `program_id(2)`.

    The end is 0 for a tile that does not exist. Pairs past the end read row 0 of x.
    """
    expert = tl.arange(0, routed.EXPERTS)
    known = expert < routed.experts
    begin = tl.load(routed.starts + expert, mask=known, other=0)
    count = tl.load(routed.starts + expert + 1, mask=known, other=0) - begin
    tiles = tl.cdiv(count, BLOCK_M)
    before = tl.cumsum(tiles, 0) - tiles
    place = tl.program_id(2) - before
    mine = (place >= 0) & (place < tiles)  # true for one expert at most
    which = tl.sum(tl.where(mine, expert, 0), 0)
    first = tl.sum(tl.where(mine, begin + place * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(mine, begin + count, 0), 0)
    pairs = first + tl.arange(0, BLOCK_M)
    rows = tl.where(pairs < last, pairs, 0)
    if routed.tokens is not None:
        rows = tl.load(routed.tokens + rows, mask=pairs < last, other=0)
    return which, pairs, rows, last


@triton.jit
def owner_of(pair, starts, experts, EXPERTS: tl.constexpr):
    """Return the expert that a pair belongs to: the number of experts whose pairs end at or before it."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(starts + expert + 1, mask=expert < experts, other=0x7FFFFFFF)
    return tl.sum((ends <= pair).to(tl.int32), 0)
