"""Asks the system to read a model's weights while Python still imports torch, which takes as long as the disk does.

Only a hint: nothing waits for it and nothing fails by it. Does not import torch.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from mycli.runtime.device.system import memory


def _advise(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def prefetch_files(folder: Path) -> None:
    """Begin to read every safetensors file of `folder`, or the GGUF file that it is, into the page cache.

    None where they fill half the free memory.

    The advice itself waits where the disk's queue is full, so a thread gives it.
    """
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    with suppress(OSError):
        if hasattr(os, "posix_fadvise") and sum(path.stat().st_size for path in paths) < memory().available // 2:
            Thread(target=_advise, args=(paths,), daemon=True).start()
