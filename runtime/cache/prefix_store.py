"""Files of the disk prefix cache: keys and values of `PIECE` tokens each, and recurrent states after them.

A file's name is a chain of SHA-256 over `identity` (all that the values depend on) and all tokens up to its end. The
least recently used files are removed when the limit is reached. POSIX only.

Layout, little-endian: `HEADER` (magic, identity, name, bytes of the values), the tokens as int64, the values, and the
SHA-256 of all of that.
"""

import hashlib
import os
import re
import stat
import struct
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.cache.prefix_index import PIECE, StoredPiece, StoredPrefix
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import disk_errors, write_atomic

MAX_PENDING = 256 << 20  # bytes queued to be written; above that, pieces are not stored instead of blocking a pass
_MAGIC = b"mycli-kv"
HEADER = struct.Struct("<8s32s32sQ")
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_LEFT = re.compile(r"\.[0-9a-f]{64}\.kv\.[0-9a-f]{12}\.tmp")  # left by a process that was killed while writing
_NO_FILE = "not a regular file"
_STALE = 3600.0  # seconds after which a temporary file is abandoned
_RESCAN = 1 / 16  # of the limit: after writing this share, scan the folder again, since other processes write too


class UntrustedError(UsageError):
    """Other users can write to a folder."""


@dataclass(frozen=True)
class StoreStats:
    """Counts of pieces read, written and skipped because the queue was full, and of files ignored, by reason."""

    read: int
    written: int
    skipped: int
    ignored: dict[str, int]
    nbytes: int  # of all files, of all models: at the last scan, plus files written since


def _pieces(identity: bytes, tokens: Sequence[int]) -> Iterator[StoredPiece]:
    name, now = identity, time.time_ns()
    for index in range(len(tokens) // PIECE):
        packed = array("q", tokens[index * PIECE : (index + 1) * PIECE]).tobytes()
        name = hashlib.sha256(name + packed).digest()
        yield StoredPiece(index, name, packed, now - index)


class PrefixStore:
    """The folder of the disk prefix cache. One thread calls `find` and `read`; any thread may call `write`."""

    def __init__(
        self, folder: Path, identity: bytes, limit: int, warn: Callable[[str], None] = lambda warning: None
    ) -> None:
        """Open or create `folder`; `limit`: bytes of all files; `warn` is called once per reason to ignore a file.

        Raises UsageError if `folder` cannot be created or written, UntrustedError if other users can write to it.
        """
        self.folder, self._identity, self._limit, self._warn = folder, identity, limit, warn
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            if not stat.S_ISDIR(state.st_mode) or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise UsageError(f"{folder}: cannot be written", "choose another folder")
        # A checksum does not detect a deliberate change, so a folder that others can write to is refused.
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            message = f"{folder}: other users can write to this folder, so its files cannot be trusted"
            raise UntrustedError(message, f"choose a folder of your own, or: chmod go-w {folder}")
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        self._pending: dict[bytes, int] = {}  # bytes of queued pieces, by name
        self._read = self._written = self._skipped = 0
        self._ignored: Counter[str] = Counter()
        self._since_scan = 0
        self._nbytes = 0
        self._make_room(0)

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(self._read, self._written, self._skipped, dict(self._ignored), self._nbytes)

    def _path(self, piece: StoredPiece) -> Path:
        return self.folder / f"{piece.name.hex()}.kv"

    def _size(self, nbytes: int) -> int:
        return HEADER.size + PIECE * 8 + nbytes + hashlib.sha256().digest_size

    def find(self, tokens: Sequence[int], nbytes: int) -> StoredPrefix:
        """Return the stored leading pieces of `tokens`, without opening them. nbytes: of the values of a piece."""
        stored: list[StoredPiece] = []
        miss = "shorter than one file" if len(tokens) % PIECE else ""
        for piece in _pieces(self._identity, tokens):
            if missing := self.why_missing(piece, nbytes):
                miss = missing
                break
            stored.append(piece)
        self._touch(stored)
        return StoredPrefix(tuple(stored), miss and f"{miss} (from token {len(stored) * PIECE + 1})")

    def why_missing(self, piece: StoredPiece, nbytes: int) -> str:
        """Return why a piece has no file of the right size, "" if it has one. The file is not opened."""
        try:
            state = self._path(piece).lstat()
        except OSError:
            return "not stored on disk"
        if stat.S_ISREG(state.st_mode) and state.st_size == self._size(nbytes):
            return ""
        self._ignore(piece, "truncated" if stat.S_ISREG(state.st_mode) else _NO_FILE)
        return "damaged on disk"

    def _touch(self, pieces: Iterable[StoredPiece]) -> None:
        for piece in pieces:
            with suppress(OSError):
                os.utime(self._path(piece), ns=(piece.used, piece.used), follow_symlinks=False)

    def read(self, piece: StoredPiece, nbytes: int) -> bytearray | None:
        """Return the `nbytes` of values of a piece, or None, after removing the file, if it is missing or damaged."""
        # Never raises: a damaged cache costs time, not the reply. Owner, size, identity, tokens and checksum are
        # compared before a value is used.
        expected = HEADER.pack(_MAGIC, self._identity, piece.name, nbytes) + piece.tokens
        try:
            data = _contents(self._path(piece), self._size(nbytes))
        except OSError as error:
            self._ignore(piece, f"unreadable ({error.strerror or error})")
            return None
        reason = data if isinstance(data, str) else _difference(data, expected)
        if isinstance(data, str) or reason:
            self._ignore(piece, reason)
            return None
        with self._lock:
            self._read += 1
        return data[len(expected) : -hashlib.sha256().digest_size]

    def _ignore(self, piece: StoredPiece, reason: str) -> None:
        with suppress(OSError):
            self._path(piece).unlink()
        self._count(reason, f"{self._path(piece)}: {reason}; the file is removed and its tokens are computed again")

    def _count(self, reason: str, warning: str) -> None:
        with self._lock:
            first = not self._ignored[reason]
            self._ignored[reason] += 1
        if first:
            self._warn(warning)

    def pieces(self, tokens: Sequence[int]) -> list[StoredPiece]:
        return list(_pieces(self._identity, tokens))

    def missing(self, pieces: Iterable[StoredPiece]) -> list[StoredPiece]:
        """Return the pieces that are neither stored nor queued, and mark the stored ones as used now."""
        stored = {piece: self._path(piece).exists() for piece in pieces}
        self._touch(piece for piece in stored if stored[piece])
        return [piece for piece in stored if not stored[piece] and piece.name not in self._pending]

    def write(self, piece: StoredPiece, values: bytes) -> None:
        """Queue the values of a piece to be written; skip them if `MAX_PENDING` bytes are queued already."""
        with self._lock:
            if piece.name in self._pending:
                return
            if sum(self._pending.values()) + len(values) > MAX_PENDING:
                self._skipped += 1
                return
            self._pending[piece.name] = len(values)
        self._writer.submit(self._write, piece, values)

    def flush(self) -> None:
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write the queued pieces and stop the writer thread."""
        self._writer.shutdown()

    # On the writer thread, which the interpreter waits for at exit:

    def _write(self, piece: StoredPiece, values: bytes) -> None:
        try:
            size = self._size(len(values))
            if self._nbytes + size > self._limit or self._since_scan > self._limit * _RESCAN:
                self._make_room(size)
            if self._nbytes + size > self._limit:
                return
            body = HEADER.pack(_MAGIC, self._identity, piece.name, len(values)) + piece.tokens + values
            # Not flushed to disk: after a power failure the checksum rejects a partial file.
            write_atomic(self._path(piece), body + hashlib.sha256(body).digest(), private=True, flushed=False)
            self._touch([piece])
            with self._lock:
                self._written += 1
                self._nbytes += size
                self._since_scan += size
        except OSError as error:
            reason = f"cannot be written ({error.strerror or error})"
            self._count(reason, f"{self.folder}: {reason}; this prefix is not stored on disk")
        finally:
            with self._lock:
                del self._pending[piece.name]

    def _make_room(self, nbytes: int) -> None:
        # Remove the least recently used cache files until `nbytes` more are within the limit; leave other files.
        files = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(state.st_mode):
                        files.append((state.st_mtime_ns, state.st_size, entry.path))
                    elif _LEFT.fullmatch(entry.name) and time.time() - state.st_mtime > _STALE:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total + nbytes <= self._limit:
                break
            with suppress(OSError):
                os.unlink(path)
                total -= size
        with self._lock:
            self._nbytes, self._since_scan = total, 0


def _contents(path: Path, size: int) -> bytearray | str:
    # O_NOFOLLOW and O_NONBLOCK: a link or a named pipe with this name must neither be followed nor block.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return _NO_FILE
        # A checksum does not detect a deliberate change, so a folder that others can write to is refused.
        if state.st_uid != os.geteuid():
            return "owned by another user"
        if state.st_size != size:
            return "truncated"
        data, at = bytearray(size), 0
        while at < size and (count := os.preadv(descriptor, [memoryview(data)[at:]], at)):
            at += count
        return data if at == size else "truncated"
    finally:
        os.close(descriptor)


def _difference(data: bytearray, expected: bytes) -> str:
    end = len(data) - hashlib.sha256().digest_size
    if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
        return "damaged"
    if data[: len(expected)] == expected:
        return ""
    if data[:8] != _MAGIC:
        return "not in this file format"
    return "written by another model or version" if data[8:40] != expected[8:40] else "written for other tokens"
