"""A file that a person names to be read: there, regular, or a pipe where that is of use, and never read without bound.

A device such as /dev/zero has no end, and a pipe may have no writer. Knows paths and bytes; does not know what is in a
file, nor which option named it. Files of a model are read by `runtime.checkpoint.stable_file`.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.utils.units import human_bytes

MAX_TEXT_BYTES = 256 << 20  # of a text that is read whole: some sixty million tokens


@contextmanager
def open_input(path: Path, *, pipes: bool = False) -> Iterator[BinaryIO]:
    """The regular file at `path`, or with `pipes` a pipe too, opened for reading in binary.

    Raises NotFoundError where there is none, and UsageError for anything else than a file that can be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: {reason}", "name a file that can be read") from None
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"{path}: {kind}", "name a file that can be read")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_input(path: Path, limit: int, *, pipes: bool = False) -> bytes:
    """The whole file of at most `limit` bytes. Raises what `open_input` raises, and UsageError for a larger one."""
    try:
        with open_input(path, pipes=pipes) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file that can be read") from None
    if len(data) > limit:
        raise UsageError(f"{path}: more than {human_bytes(limit)}", "give a part of it")
    return data
