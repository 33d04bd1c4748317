"""Reads regular files that must not change while they are read. POSIX only.

Every read copies: a mapped file that is truncated kills the process (SIGBUS). The file's identity is compared before
and after each read.
"""

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from mycli.runtime.device.system import memory
from mycli.runtime.errors import ModelError

CHUNK = 8 << 20  # bytes
# Bytes of one call: a signal and a cancellation wait for the call, half a second on a disk of 4 MB/s.
_READ_AT_ONCE = 2 << 20
# A pipe or link may have replaced the file since it was found: O_NONBLOCK does not hang, O_NOFOLLOW does not follow.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class StoredFile(ABC):
    """A file that tensors are read from; `name` is for messages. Reading raises ModelError if it changed."""

    name: str
    size: int

    @abstractmethod
    def read_into(self, view: memoryview, offset: int, cancelled: Event | None = None) -> None:
        """Fill `view` (writable bytes) from `offset`. Raises CancelledError soon after `cancelled` is set."""

    @abstractmethod
    def prefetch(self, offset: int, count: int) -> None: ...

    def read(self, count: int, offset: int = 0) -> bytes:
        data = bytearray(max(0, min(count, self.size - offset)))
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def chunks(self, offset: int, count: int) -> Iterator[memoryview]:
        """Yield `count` bytes from `offset` in pieces of at most `CHUNK`, each valid until the next."""
        buffer = memoryview(bytearray(min(CHUNK, count)))
        for position in range(0, count, CHUNK):
            piece = buffer[: min(CHUNK, count - position)]
            self.read_into(piece, offset + position)
            yield piece


@dataclass(frozen=True)
class RegularFile(StoredFile):
    """A file as it was when found; `path` has no links. Safe to use from several threads."""

    path: Path
    device: int
    inode: int
    mtime_ns: int

    @classmethod
    def find(cls, path: Path) -> "RegularFile":
        """Find the file at `path` and resolve its links once. Raises ModelError for a missing or irregular file."""
        try:
            real = Path(os.path.realpath(path, strict=True))
            info = os.lstat(real)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(f"{path.name}: {reason} (in {path.parent})", code="pull-whole") from None
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(f"{path.name}: not a regular file (in {path.parent})", "only regular files are opened")
        return cls(path.name, info.st_size, real, info.st_dev, info.st_ino, info.st_mtime_ns)

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

    def read_into(self, view: memoryview, offset: int, cancelled: Event | None = None) -> None:
        with self._open() as descriptor:
            while view:
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError
                count = os.preadv(descriptor, [view[:_READ_AT_ONCE]], offset)
                if not count:
                    raise ModelError(
                        f"{self.name}: the file was truncated while it was being read", code="wait-or-pull-again"
                    )
                view, offset = view[count:], offset + count

    def prefetch(self, offset: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(ModelError), self._open() as descriptor:
                os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


def prefetch_files(folder: Path) -> None:
    """Start reading the safetensors files of `folder`, or a GGUF file, into the page cache, in the background.

    A hint that never fails. Does nothing for files of more than half the free memory.
    """
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    with suppress(OSError):
        if hasattr(os, "posix_fadvise") and sum(path.stat().st_size for path in paths) < memory().available // 2:
            # posix_fadvise blocks while the disk's queue is full.
            Thread(target=_advise, args=(paths,), daemon=True).start()


def _advise(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
