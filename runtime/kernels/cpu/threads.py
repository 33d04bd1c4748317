"""Releases the OpenMP worker threads of the calling thread."""

import ctypes

from mycli.runtime.kernels.cpu.library.compiler import BuildError, torch_openmp

_SOFT = 1  # `omp_pause_soft` of OpenMP 5.0


def release_threads() -> None:
    """End the calling thread's OpenMP workers, which restart on demand; no effect before OpenMP 5.0."""
    # GCC's OpenMP counts the workers of all threads. If there are more than cores, each sleeps as soon as it is idle,
    # and waking it takes longer than a small product.
    try:
        pause = ctypes.CDLL(torch_openmp()).omp_pause_resource_all
    except (BuildError, OSError, AttributeError):
        return
    pause(_SOFT)
