"""The threads that OpenMP keeps ready for whoever works in parallel. Does not know who that is."""

import ctypes

from mycli.runtime.kernels.cpu.library.compiler import BuildError, torch_openmp

_SOFT = 1  # `omp_pause_soft` of OpenMP 5.0


def release_threads() -> None:
    """End the threads that are kept for the calling one, which has others made if it works in parallel again.

    GCC's OpenMP counts the threads of all who have some. Where they are more than there are cores, each sleeps as soon
    as it has nothing to do, and waking them takes longer than a small product. Nothing where OpenMP is older or none.
    """
    try:
        pause = ctypes.CDLL(torch_openmp()).omp_pause_resource_all
    except (BuildError, OSError, AttributeError):
        return
    pause(_SOFT)
