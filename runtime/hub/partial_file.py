"""A file being downloaded: resumed by any later process, and hashed as it arrives.

huggingface_hub 2.4 cannot do this: its unfinished files have random names and are deleted on failure, so another
process starts at byte 0, and it compares sizes, not hashes.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mycli.runtime.errors import ResourceError
from mycli.runtime.hub.client import RESUMABLE, Hub, TransientError
from mycli.runtime.hub.store import HubFile
from mycli.runtime.utils.files import disk_errors
from mycli.runtime.utils.units import human_bytes

_CHUNK = 1 << 20


class PartialFile:
    """The file under its temporary name; entering hashes the bytes that an earlier attempt left.

    Bytes are written at explicit positions: where locks do not work, two processes write the same file.
    """

    def __init__(self, path: Path, file: HubFile, advance: Callable[[float], None]) -> None:
        self._path, self._file, self._advance = path, file, advance
        self._stream: IO[bytes]
        self._hash = file.hasher()
        self.done = 0

    def __enter__(self) -> "PartialFile":
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._stream = os.fdopen(descriptor, "r+b", buffering=0)
        if os.fstat(descriptor).st_size <= self._file.size:
            while chunk := self._stream.read(_CHUNK):
                self._hash.update(chunk)
                self.done += len(chunk)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _restart(self) -> None:
        self._advance(-self.done)
        self.done, self._hash = 0, self._file.hasher()

    def receive(self, hub: Hub, repo: str, commit: str) -> None:
        hub.policy.run(lambda: self._receive(hub, repo, commit), hub.note, lambda: self.done)

    def _receive(self, hub: Hub, repo: str, commit: str) -> None:
        name, size = self._file.name, self._file.size
        if self.done == size:
            return
        with hub.open(repo, commit, name, self.done) as response:
            host, partial = response.url.host, response.status_code == 206
            if response.status_code == 416:
                self._restart()
                raise TransientError(f"{host} does not continue {name}")
            if self.done and not partial:  # 200: the server ignores ranges
                self._restart()
                hub.note(f"{host} cannot continue {name}: starting it again")
            elif self.done and not response.headers.get("Content-Range", "").startswith(f"bytes {self.done}-"):
                self._restart()
                raise TransientError(f"{host} sends another part of {name} than was requested")
            for chunk in response.iter_bytes():
                self._write(chunk[: size - self.done])  # a body may be longer than the recorded size
                if self.done == size:
                    return
            raise TransientError(f"{host} sent {self.done} of {size} bytes of {name}")

    def _write(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        position = self.done
        while chunk:
            try:
                written = os.pwrite(self._stream.fileno(), chunk, position)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    with disk_errors(self._path.parent):
                        raise
                problem = f"{self._path.parent}: the disk is full, {human_bytes(self._file.size - self.done)} too early"
                raise ResourceError(problem, f"free some space; {RESUMABLE}") from None
            position, chunk = position + written, chunk[written:]
        self._advance(position - self.done)
        self.done = position

    def finish(self) -> bool:
        """Flush the file to disk and return True; return False if its hash differs from the hub's record."""
        if self._hash.hexdigest() != self._file.digest:
            return False
        os.ftruncate(self._stream.fileno(), self._file.size)
        os.fsync(self._stream.fileno())
        return True
