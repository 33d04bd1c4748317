"""A launch that begins before the one before it ends, as Triton device code: programmatic dependent launch.

From compute capability 9.0 (PTX ISA, griddepcontrol). A kernel that is launched so does nothing to memory before
`pdl_wait` but hint that weights be brought to the L2 cache, which no earlier launch writes; all of its loads and
stores come after. It lets the next launch begin only once its own wait is over, so no more than two are under way, and
what it reads has been written by launches that ended before it began or by the one it waited for.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_EARLY = tl.constexpr(1 << 15)  # bytes that a program fetches: with all others, what memory brings in 4 us


@triton.jit
def pdl_wait():
    """Waits for the launch before this one to end, and lets the next begin."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def prefetch_weights(start, first, last, stride, size, RUNS: tl.constexpr, WARPS: tl.constexpr):
    """To the L2 cache: the beginning of RUNS runs from the `first`; past the `last`, that one again.

    Runs are `stride` bytes apart, and what is wanted of each are `size` bytes from `start` in the first of all: all are
    multiples of 16. One thread asks for all of a run: the instruction takes a warp's threads one after the other.
    """
    EACH: tl.constexpr = 32 * WARPS // RUNS
    thread = tl.arange(0, 32 * WARPS)
    run = tl.minimum(first + thread // EACH, last)
    wanted = tl.where(thread % EACH == 0, tl.minimum(size, _EARLY // RUNS), 0)
    tl.inline_asm_elementwise(  # a prefetch of nothing is undefined, hence the predicate
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; mov.u32 $0, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=&r,l,r",
        [start.to(tl.int64) + run.to(tl.int64) * stride, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
