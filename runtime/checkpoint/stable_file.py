"""Reading a file that must be regular and must not change: no pipe to hang on, no map to crash on when it shrinks.

A mapped file that is truncated kills the process (SIGBUS); here every read copies, and the file's identity is compared
before and after. Knows nothing of what the bytes mean. POSIX only.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.errors import ModelError

CHUNK = 8 << 20  # bytes
# O_NONBLOCK: a pipe that took the place of the file must not hang us. O_NOFOLLOW: nor may a link that did.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class RegularFile:
    """A file as it was when first seen; `name` is for messages, `path` has no link in it. Safe to share by threads."""

    name: str
    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def find(cls, path: Path) -> "RegularFile":
        """The file at `path`, links resolved once. Raises ModelError for a missing or irregular one."""
        try:
            real = Path(os.path.realpath(path, strict=True))
            info = os.lstat(real)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(f"{path.name}: {reason} (in {path.parent})", code="pull-whole") from None
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(f"{path.name}: not a regular file (in {path.parent})", "only regular files are opened")
        return cls(path.name, real, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)

    def _check(self, descriptor: int) -> None:
        info = os.fstat(descriptor)
        now = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        if now != (self.device, self.inode, self.size, self.mtime_ns) or not stat.S_ISREG(info.st_mode):
            raise ModelError(f"{self.name}: the file was changed while it was being read", code="wait-or-pull-again")

    @contextmanager
    def _open(self) -> Iterator[int]:
        try:
            descriptor = os.open(self.path, _FLAGS)
            try:
                self._check(descriptor)
                yield descriptor
                self._check(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ModelError(f"{self.name}: {error.strerror} ({self.path})", "check the disk and permissions") from None

    def _fill(self, descriptor: int, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise ModelError(
                    f"{self.name}: the file was truncated while it was being read", code="wait-or-pull-again"
                )
            view, offset = view[count:], offset + count

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` (writable bytes) from `offset`. Raises ModelError if the file is not the one first seen."""
        with self._open() as descriptor:
            self._fill(descriptor, view, offset)

    def expect(self, offset: int, count: int) -> None:
        """Ask the system to read `count` bytes from `offset` ahead: a hint, which no error comes of."""
        if hasattr(os, "posix_fadvise"):
            with suppress(ModelError), self._open() as descriptor:
                os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)

    def read(self, count: int, offset: int = 0) -> bytes:
        """`count` bytes from `offset`, fewer at the end of the file."""
        data = bytearray(max(0, min(count, self.size - offset)))
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def chunks(self, offset: int, count: int) -> Iterator[memoryview]:
        """`count` bytes from `offset` in pieces of at most `CHUNK`; each is valid until the next."""
        buffer = memoryview(bytearray(min(CHUNK, count)))
        with self._open() as descriptor:
            for position in range(0, count, CHUNK):
                piece = buffer[: min(CHUNK, count - position)]
                self._fill(descriptor, piece, offset + position)
                yield piece
