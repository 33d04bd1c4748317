"""Programmatic dependent launch (PDL): a launch that begins before the previous one ends, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# From compute capability 9.0 (PTX ISA, griddepcontrol). Before `pdl_wait` a kernel may only prefetch weights to the
# L2 cache, which no earlier launch writes; all other loads and stores come after, so that what a kernel reads was
# written by launches that have ended. A kernel that lets the next launch begin before its own wait lets it prefetch
# earlier. Attention also loads lengths and block tables before its wait: these were written before the launch that
# precedes it, which therefore must wait before it lets attention begin.

_EARLY = tl.constexpr(1 << 15)  # bytes per program: all programs together fetch what memory delivers in 4 us


@triton.jit
def pdl_wait(FIRST: tl.constexpr = False):
    """Wait for the previous launch to end, and let the next one begin: then, or before where FIRST."""
    if FIRST:
        gdc_launch_dependents()
    gdc_wait()
    if not FIRST:
        gdc_launch_dependents()


@triton.jit
def prefetch_weights(start, first, last, stride, size, RUNS: tl.constexpr, WARPS: tl.constexpr):
    """Prefetch the beginning of RUNS runs of weights to the L2 cache; runs past `last` repeat it.

    Run i begins at `start` + i * `stride` bytes and has `size` bytes; all are multiples of 16.
    """
    # One thread prefetches a whole run: the instruction handles the threads of a warp one after the other.
    THREADS: tl.constexpr = 32 * WARPS // RUNS
    thread = tl.arange(0, 32 * WARPS)
    run = tl.minimum(first + thread // THREADS, last)
    count = tl.where(thread % THREADS == 0, tl.minimum(size, _EARLY // RUNS), 0)
    _prefetch(start.to(tl.int64) + run.to(tl.int64) * stride, count)


@triton.jit
def prefetch_run(start, size):
    """Prefetch the beginning of `size` bytes from a pointer to the L2 cache, none if negative."""
    thread = tl.arange(0, 128)
    begin = start.to(tl.int64) // 16 * 16
    _prefetch(begin + thread * 0, tl.where(thread == 0, tl.minimum(size // 16 * 16, _EARLY), 0))


@triton.jit
def _prefetch(address, count):
    tl.inline_asm_elementwise(  # a prefetch of 0 bytes is undefined, hence the predicate
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; mov.u32 $0, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=&r,l,r",
        [address, count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
