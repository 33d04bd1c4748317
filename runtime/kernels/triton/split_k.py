"""Split-K with a semaphore, as Triton device code: the last program to arrive at a piece of a result finishes it.

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


class Epilogue(NamedTuple):
    """What is done with each piece of a product once it is there, as the kernels take it.

    A piece is SPAN rows of the weight, the last one what is left; with RANGES of 2, those of each half of the rows
    (gate and up). `function(parts, count, piece, row, rows, arguments)` gets the fp32 parts [count, rows, n] of the
    product, and does `arguments.ROWS` of its rows from `row` (`Tile.rows_at_once`).
    """

    function: Any
    counters: Any  # int32 [blocks of rows, pieces], zeros
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
def run_epilogue(epilogue, parts, rows, n, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Called by each program of a grid (blocks of n, parts, blocks of rows) after it stored its share of `parts`.

    Up to 8 rows are one block, done at once: an index or a loop would take registers from the product.
    """
    begin = tl.program_id(0) * BLOCK_N
    end, length = tl.minimum(begin + BLOCK_N, n), n // epilogue.RANGES
    first, here = _touched(begin, end, 0, length, epilogue.SPAN)
    other, there = _touched(begin, end, length, length * (epilogue.RANGES - 1), epilogue.SPAN)
    counters, top = epilogue.counters, 0
    if BLOCK_M > 8:
        counters += tl.program_id(2) * tl.cdiv(length, epilogue.SPAN)
        top = tl.program_id(2) * BLOCK_M
    for visit in tl.range(here + there):
        piece = tl.where(visit < here, first + visit, other + visit - here)
        low, high = piece * epilogue.SPAN, tl.minimum((piece + 1) * epilogue.SPAN, length) - 1
        blocks = high // BLOCK_N - low // BLOCK_N + 1
        if epilogue.RANGES == 2:
            blocks += (length + high) // BLOCK_N - (length + low) // BLOCK_N + 1
        count = tl.num_programs(1)
        if last_to_arrive(counters + piece, blocks * count):
            if BLOCK_M <= 8:
                epilogue.function(parts, count, piece, 0, rows, epilogue.arguments)
            else:
                for row in tl.range(top, tl.minimum(top + BLOCK_M, rows), epilogue.arguments.ROWS):
                    epilogue.function(parts, count, piece, row, rows, epilogue.arguments)


@triton.jit
def add_parts(parts, place, count, stride, inside):
    """The sum of `count` parts `stride` apart, in order, at `place` [a, b].

    Each turn costs one latency of the L2 cache: where a thread has few numbers, up to 16 loads are under way.
    """
    FEW: tl.constexpr = 4096 // (place.shape[0] * place.shape[1])
    LOADS: tl.constexpr = 16 if FEW >= 16 else (8 if FEW >= 8 else 4)
    total = tl.zeros(place.shape, tl.float32)
    for first in tl.range(0, count, LOADS):
        for part in tl.static_range(LOADS):
            source = parts + place + (first + part) * stride
            total += tl.load(source, mask=inside & (first + part < count), other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["count"])
def reduce_kernel(parts, y, count, size, BLOCK: tl.constexpr):
    """y[size] = sum of parts[count, size], fp32, in order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    source = parts + place
    for _ in tl.range(count):
        total += tl.load(source, mask=inside, other=0.0)
        source += size
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
