"""Which program of a launch is the last to finish a piece of its result, as Triton device code.

That program does what comes next for the piece, in the same launch. Only *who* does it depends on the order in which
programs finish; sums are taken in the order of their parts, so the same input gives the same bits. Counters are int32,
zero before a launch and after it: a captured graph can be replayed. What is read after arrival, and was written by
other programs of the launch, must be loaded past the L1 cache (".cg").
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl


@triton.jit
def last_to_arrive(counter, expected):
    """Whether the `expected` programs that share this counter have all come; what they stored can be read then."""
    tl.debug_barrier()  # the stores of all threads come before the atomic of one
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last
