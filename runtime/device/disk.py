"""How fast a disk is read: measured on the very file that is to be read, a little of it, past the page cache.

Knows files; not what is in them. Does not import torch.
"""

import os
import time
from pathlib import Path

ASSUMED = 2.0  # 10^9 bytes per second where nothing can be measured: a usual NVMe disk
_PART, _MEASURED = 4 << 20, 64 << 20  # bytes: read at a time, about an expert; read in all


def read_rate(path: Path, nbytes: int = _MEASURED) -> float | None:
    """10^9 bytes per second that pieces out of the middle of a file are read at; None where that cannot be measured.

    The system is asked to forget them before, so that the disk is measured; a host may still have them in memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        count = min(nbytes, os.fstat(descriptor).st_size)
        start = (os.fstat(descriptor).st_size - count) // 2
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)
        began, left = time.perf_counter(), count
        while left > 0:
            found = len(os.pread(descriptor, min(_PART, left), start + count - left))
            if not found:
                return None
            left -= found
        return count / (time.perf_counter() - began) / 1e9 if count else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
