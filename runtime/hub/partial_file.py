"""One file on its way from the hub to the disk: resumed across processes, hashed as it comes.

This is what huggingface_hub does not have: its unfinished files have names of chance, and another process starts anew.
Knows a hash and a position in a file. Does not know the cache's layout.
"""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mycli.runtime.errors import ResourceError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.retry import RESUMABLE, TransientError
from mycli.runtime.hub.store import HubFile
from mycli.runtime.utils.units import human_bytes

_BLOCK = 1 << 20


def hasher(file: HubFile) -> "hashlib._Hash":
    """A hash that, fed with the contents of `file`, must give its digest."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


class PartialFile:
    """The file under a temporary name: goes on after what an earlier attempt left, hashing all of it on the way.

    Bytes are written at their own positions, so two processes that both believe to be alone write the same file.
    """

    def __init__(self, path: Path, file: HubFile, advance: Callable[[float], None]) -> None:
        self._path, self._file, self._advance = path, file, advance
        self._stream: IO[bytes]
        self._hash = hasher(file)
        self.done = 0

    def __enter__(self) -> "PartialFile":
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._stream = os.fdopen(descriptor, "r+b", buffering=0)
        if os.fstat(descriptor).st_size <= self._file.size:
            while block := self._stream.read(_BLOCK):
                self._hash.update(block)
                self.done += len(block)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _restart(self) -> None:
        self._advance(-self.done)
        self.done, self._hash = 0, hasher(self._file)

    def receive(self, hub: Hub, repo: str, commit: str) -> None:
        """Bring the rest. Raises TransientError when the connection ends before it is all there."""
        name, size = self._file.name, self._file.size
        if self.done == size:
            return
        with hub.open(repo, commit, name, self.done) as response:
            host, continues = response.url.host, response.status_code == 206
            if response.status_code == 416:
                self._restart()
                raise TransientError(f"{host} does not continue {name}")
            begins = response.headers.get("Content-Range", "").startswith(f"bytes {self.done}-")
            if self.done and not (continues and begins):
                self._restart()
                if continues:
                    raise TransientError(f"{host} sends another part of {name} than asked for")
                hub.note(f"{host} cannot continue {name}: starting it again")
            for chunk in response.iter_bytes():
                self._write(chunk[: size - self.done])
                if self.done == size:
                    return
            raise TransientError(f"{host} sent {self.done} of {size} bytes of {name}")

    def _write(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        at = self.done
        while chunk:
            try:
                written = os.pwrite(self._stream.fileno(), chunk, at)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                problem = f"{self._path.parent}: the disk is full, {human_bytes(self._file.size - self.done)} too early"
                raise ResourceError(problem, f"free some space; {RESUMABLE}") from None
            at, chunk = at + written, chunk[written:]
        self._advance(at - self.done)
        self.done = at

    def finish(self) -> bool:
        """Whether all is as the hub records it; then it is on the disk for good."""
        if self._hash.hexdigest() != self._file.digest:
            return False
        os.ftruncate(self._stream.fileno(), self._file.size)
        os.fsync(self._stream.fileno())
        return True
