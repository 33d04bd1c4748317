"""Split-K, as Triton device code: the last program to finish a piece of a result, or a launch, runs its epilogue."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.pdl import pdl_wait

# Of few rows, the last program to finish a piece of a result runs its epilogue: a semaphore counts arrivals. It would
# handle many rows one after the other, so that their epilogue is a launch of its own, with a program for each row.
#
# Only which program runs it depends on timing; parts are summed in order, so the same input gives the same bits.
# Counters are int32, zero before and after a launch, so a captured graph can be replayed. What other programs of the
# launch have written must be loaded past the L1 cache (".cg").


class Epilogue(NamedTuple):
    """The code that a launch runs on each finished piece of a product, as kernel arguments.

    A piece is SPAN rows of the weight, the last one the rest; with RANGES 2, SPAN rows of each half (gate and up).
    `function(parts, count, piece, row, rows, arguments)` gets split-K parts fp32 [count, rows, n] and handles
    `arguments.ROWS` rows from `row` (`Tile.rows_at_once`).
    """

    function: Any
    counters: Any  # int32 [pieces], zeros; None for a launch of its own
    arguments: Any
    SPAN: Any
    RANGES: Any


@triton.jit
def last_to_arrive(counter, expected):
    """Return whether this is the last of `expected` programs to arrive; the stores of all are then visible."""
    tl.debug_barrier()  # the stores of all threads come before the atomic of one
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _touched(begin, end, low, length, SPAN: tl.constexpr):
    """Return the first piece from `low` that rows `begin` to `end` overlap, and the number of such pieces."""
    start, stop = tl.maximum(begin - low, 0), tl.minimum(end - low, length)
    return start // SPAN, tl.where(start < stop, tl.cdiv(stop, SPAN) - start // SPAN, 0)


@triton.jit
def run_epilogue(epilogue, parts, rows, n, BLOCK_N: tl.constexpr):
    """Count the arrival of this program, of grid (blocks of n, parts), and run finished epilogues of up to 8 rows."""
    begin = tl.program_id(0) * BLOCK_N
    end, length = tl.minimum(begin + BLOCK_N, n), n // epilogue.RANGES
    first, here = _touched(begin, end, 0, length, epilogue.SPAN)
    other, there = _touched(begin, end, length, length * (epilogue.RANGES - 1), epilogue.SPAN)
    for index in tl.range(here + there):
        piece = tl.where(index < here, first + index, other + index - here)
        low, high = piece * epilogue.SPAN, tl.minimum((piece + 1) * epilogue.SPAN, length) - 1
        blocks = high // BLOCK_N - low // BLOCK_N + 1
        if epilogue.RANGES == 2:
            blocks += (length + high) // BLOCK_N - (length + low) // BLOCK_N + 1
        count = tl.num_programs(1)
        if last_to_arrive(epilogue.counters + piece, blocks * count):
            epilogue.function(parts, count, piece, 0, rows, epilogue.arguments)


@triton.jit(do_not_specialize=["count", "rows"])
def epilogue_kernel(parts, count, rows, epilogue, PDL: tl.constexpr):
    """Grid (pieces, blocks of ROWS rows): the epilogue as a launch of its own."""
    if PDL:
        pdl_wait()
    first = tl.program_id(1) * epilogue.arguments.ROWS
    epilogue.function(parts, count, tl.program_id(0), first, rows, epilogue.arguments)


@triton.jit
def add_parts(parts, place, count, stride, inside, LEAST: tl.constexpr = 4):
    """Sum `count` parts, `stride` apart, in order, at `place` [a, b]. LEAST: the fewest loads of a thread at a time."""
    # Each iteration costs the latency of the L2 cache: where a thread has few values, up to 16 loads are in flight.
    FEW: tl.constexpr = 4096 // (place.shape[0] * place.shape[1])
    LOADS: tl.constexpr = 16 if FEW >= 16 else (8 if FEW >= 8 else (4 if FEW >= 4 else LEAST))
    total = tl.zeros(place.shape, tl.float32)
    for first in tl.range(0, count, LOADS):
        for part in tl.static_range(LOADS):
            source = parts + place + (first + part) * stride
            total += tl.load(source, mask=inside & (first + part < count), other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["count"])
def reduce_kernel(parts, y, count, size, BLOCK: tl.constexpr):
    """Store y[size] = sum of parts[count, size] fp32, in order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), tl.float32)
    source = parts + place
    for _ in tl.range(count):
        total += tl.load(source, mask=inside, other=0.0)
        source += size
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
