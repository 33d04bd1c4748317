"""Kernels that do nothing but follow each other. Imports Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def chained(word):
    """One load and one store: a kernel without any may be left out."""
    tl.store(word, tl.load(word))


@triton.jit
def dependent_chained(word):
    """The same, let in before the kernel ahead has ended, and waiting for it."""
    gdc_launch_dependents()
    gdc_wait()
    tl.store(word, tl.load(word))
