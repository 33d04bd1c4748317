"""Define Triton kernels that do nothing but depend on each other."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def chained(word):
    """Perform one load and one store: a kernel without any may be optimized away."""
    tl.store(word, tl.load(word))


@triton.jit
def dependent_chained(word):
    """Do the same as `chained`, launched before the previous kernel ends and waiting for it (PDL)."""
    gdc_launch_dependents()
    gdc_wait()
    tl.store(word, tl.load(word))
