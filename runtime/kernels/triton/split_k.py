"""Which program of a launch is the last to finish a piece of its result, as Triton device code.

That program does what comes next for the piece, in the same launch. Only *who* does it depends on the order in which
programs finish; sums are taken in the order of their parts, so the same input gives the same bits. Counters are int32,
zero before a launch and after it: a captured graph can be replayed. What is read after arrival, and was written by
other programs of the launch, must be loaded past the L1 cache (".cg").
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tail(NamedTuple):
    """What is done with each piece of a product once it is there, as the kernels take it.

    A piece is SPAN rows of the weight, the last one what is left; with RANGES of 2, those of each half of the rows
    (gate and up). `function(parts, count, piece, rows, arguments)` gets the fp32 parts [count, rows, n] of the product.
    """

    function: Any
    counters: Any  # int32 [pieces], zeros
    arguments: Any
    SPAN: Any
    RANGES: Any


@triton.jit
def last_to_arrive(counter, expected):
    """Whether the `expected` programs that share this counter have all come; what they stored can be read then."""
    tl.debug_barrier()  # the stores of all threads come before the atomic of one
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _touched(begin, end, low, length, SPAN: tl.constexpr):
    """Of the pieces of `length` rows from `low`: the first that rows `begin` to `end` have a share in, and how many."""
    start, stop = tl.maximum(begin - low, 0), tl.minimum(end - low, length)
    return start // SPAN, tl.where(start < stop, tl.cdiv(stop, SPAN) - start // SPAN, 0)


@triton.jit
def finish(tail, parts, rows, n, BLOCK_N: tl.constexpr):
    """Called by each program of a grid (blocks of n, parts) after it stored its share of `parts`."""
    begin = tl.program_id(0) * BLOCK_N
    end, length = tl.minimum(begin + BLOCK_N, n), n // tail.RANGES
    first, here = _touched(begin, end, 0, length, tail.SPAN)
    other, there = _touched(begin, end, length, length * (tail.RANGES - 1), tail.SPAN)
    for visit in tl.range(here + there):
        piece = tl.where(visit < here, first + visit, other + visit - here)
        low, high = piece * tail.SPAN, tl.minimum((piece + 1) * tail.SPAN, length) - 1
        blocks = high // BLOCK_N - low // BLOCK_N + 1
        if tail.RANGES == 2:
            blocks += (length + high) // BLOCK_N - (length + low) // BLOCK_N + 1
        count = tl.num_programs(1)
        if last_to_arrive(tail.counters + piece, blocks * count):
            tail.function(parts, count, piece, rows, tail.arguments)
