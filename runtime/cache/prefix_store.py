"""Pieces of a key-value cache in a folder, so that a text is not read again after a restart.

A file holds what the cache has of `PIECE` tokens of one text, or recurrent states after them. Its name is a chain of
SHA-256 over what made the values (`identity`) and all tokens up to there, so programs that share a folder never write
different things under one name, and a file appears whole, by a rename. Nothing in a file is believed: owner, size,
identity, tokens and checksum are compared before a value is used, and one that fails is removed and counted by its
reason. The least recently used files make room.

Layout, little-endian: `HEADER` (magic, identity, name, bytes of the values), the tokens as int64, the values, and the
SHA-256 of all of that.

Knows files and bytes. Does not know tensors, models or blocks. What is written is written by a thread of its own, which
the interpreter waits for when it ends. POSIX only.
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
from dataclasses import dataclass, replace
from pathlib import Path

from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import disk_errors, write_atomic

PIECE = 64  # tokens of a file
MAX_PENDING = 256 << 20  # bytes of memory that wait to be written; more are not kept
_MAGIC = b"mycli-kv"
HEADER = struct.Struct("<8s32s32sQ")
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_LEFT = re.compile(r"\.[0-9a-f]{64}\.kv\.[0-9a-f]{12}\.tmp")  # by a process that was killed while it wrote
_NO_FILE = "not a regular file"
_STALE = 3600.0  # seconds after which nobody writes to such a file any more
_RESCAN = 1 / 16  # of the limit: after writing so much, look at what other processes have written


class UntrustedError(UsageError):
    """Other users can write to the folder."""


@dataclass(frozen=True)
class KeptPiece:
    """Piece `index` of a prefix: the name of its file, and its tokens as the file holds them.

    used: time of last use, ns since 1970; earlier pieces count as used later, since the rest is useless without them.
    """

    index: int
    name: bytes
    tokens: bytes
    used: int = 0

    @property
    def state(self) -> "KeptPiece":
        """The file of the recurrent states after the piece."""
        return replace(self, name=hashlib.sha256(self.name + b"state").digest())


@dataclass(frozen=True)
class StoredPrefix:
    """The stored pieces of a prefix in order, and why there are not more."""

    pieces: tuple[KeptPiece, ...] = ()
    miss: str = ""


@dataclass(frozen=True)
class StoreStats:
    """Counts of pieces read, written and skipped (too many waited); ignored files by reason; bytes of all files."""

    read: int
    written: int
    skipped: int
    ignored: dict[str, int]
    nbytes: int


def _pieces(identity: bytes, tokens: Sequence[int]) -> Iterator[KeptPiece]:
    name, now = identity, time.time_ns()
    for index in range(len(tokens) // PIECE):
        packed = array("q", tokens[index * PIECE : (index + 1) * PIECE]).tobytes()
        name = hashlib.sha256(name + packed).digest()
        yield KeptPiece(index, name, packed, now - index)


class PrefixStore:
    """The folder as one engine uses it: one thread calls `find` and `read`, any thread `write`."""

    def __init__(
        self, folder: Path, identity: bytes, limit: int, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        """identity: 32 bytes that stand for everything the values depend on apart from tokens; limit: bytes of all
        files; tell: receives each reason why a file is unusable, once.

        Raises UsageError for a folder that cannot be made or written, UntrustedError for one that others can write to.
        """
        self.folder, self._identity, self._limit, self._tell = folder, identity, limit, tell
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            if not stat.S_ISDIR(state.st_mode) or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise UsageError(f"{folder}: cannot be written", "choose another folder")
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            message = f"{folder}: other users can write to it, so what it holds cannot be trusted"
            raise UntrustedError(message, f"choose a folder of your own, or: chmod go-w {folder}")
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        self._pending: dict[bytes, int] = {}  # bytes of what waits to be written, by name
        self._read = self._written = self._skipped = 0
        self._ignored: Counter[str] = Counter()
        self._since_scan = 0
        self._nbytes = 0
        self._make_room(0)

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(self._read, self._written, self._skipped, dict(self._ignored), self._nbytes)

    def _path(self, piece: KeptPiece) -> Path:
        return self.folder / f"{piece.name.hex()}.kv"

    def _size(self, nbytes: int) -> int:
        return HEADER.size + PIECE * 8 + nbytes + hashlib.sha256().digest_size

    def find(self, tokens: Sequence[int], nbytes: int) -> StoredPrefix:
        """Return the stored pieces of the prefix of `tokens`, unopened. nbytes: of the values of a piece."""
        found: list[KeptPiece] = []
        miss = "less than a piece" if len(tokens) % PIECE else ""
        for piece in _pieces(self._identity, tokens):
            if why := self.lacks(piece, nbytes):
                miss = why
                break
            found.append(piece)
        self._touch(found)
        return StoredPrefix(tuple(found), miss and f"{miss} from token {len(found) * PIECE + 1} on")

    def lacks(self, piece: KeptPiece, nbytes: int) -> str:
        """Return why there is no file with `nbytes` of values for a piece; "" if there is one. It is not opened."""
        try:
            state = self._path(piece).lstat()
        except OSError:
            return "not kept on disk"
        if stat.S_ISREG(state.st_mode) and state.st_size == self._size(nbytes):
            return ""
        self._ignore(piece, "truncated" if stat.S_ISREG(state.st_mode) else _NO_FILE)
        return "damaged on disk"

    def _touch(self, pieces: Iterable[KeptPiece]) -> None:
        for piece in pieces:
            with suppress(OSError):
                os.utime(self._path(piece), ns=(piece.used, piece.used), follow_symlinks=False)

    def read(self, piece: KeptPiece, nbytes: int) -> bytearray | None:
        """Return the `nbytes` values of a piece; None if its file is missing or not what it should be.

        Never raises: faults are counted, and the file is removed.
        """
        expected = HEADER.pack(_MAGIC, self._identity, piece.name, nbytes) + piece.tokens
        try:
            data = _contents(self._path(piece), self._size(nbytes))
        except OSError as error:
            self._ignore(piece, f"unreadable ({error.strerror or error})")
            return None
        why = data if isinstance(data, str) else _difference(data, expected)
        if isinstance(data, str) or why:
            self._ignore(piece, why)
            return None
        with self._lock:
            self._read += 1
        return data[len(expected) : -hashlib.sha256().digest_size]

    def _ignore(self, piece: KeptPiece, reason: str) -> None:
        with suppress(OSError):
            self._path(piece).unlink()
        self._count(reason, f"a kept prefix is computed again, its file is {reason}: {self._path(piece)}")

    def _count(self, reason: str, told: str) -> None:
        with self._lock:
            first = not self._ignored[reason]
            self._ignored[reason] += 1
        if first:
            self._tell(told)

    def pieces(self, tokens: Sequence[int]) -> list[KeptPiece]:
        """Return all whole pieces of `tokens`, stored or not."""
        return list(_pieces(self._identity, tokens))

    def missing(self, pieces: Iterable[KeptPiece]) -> list[KeptPiece]:
        """Return the pieces that are neither stored nor being written; mark the others as used."""
        there = {piece: self._path(piece).exists() for piece in pieces}
        self._touch(piece for piece in there if there[piece])
        return [piece for piece in there if not there[piece] and piece.name not in self._pending]

    def write(self, piece: KeptPiece, values: bytes) -> None:
        """Queue the values of a piece for writing; skip it if too much waits already."""
        with self._lock:
            if piece.name in self._pending:
                return
            if sum(self._pending.values()) + len(values) > MAX_PENDING:
                self._skipped += 1
                return
            self._pending[piece.name] = len(values)
        self._writer.submit(self._write, piece, values)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Finish writing; nothing is stored afterwards."""
        self._writer.shutdown()

    # The writer's thread

    def _write(self, piece: KeptPiece, values: bytes) -> None:
        try:
            size = self._size(len(values))
            if self._nbytes + size > self._limit or self._since_scan > self._limit * _RESCAN:
                self._make_room(size)
            if self._nbytes + size > self._limit:
                return
            body = HEADER.pack(_MAGIC, self._identity, piece.name, len(values)) + piece.tokens + values
            write_atomic(self._path(piece), body + hashlib.sha256(body).digest(), private=True, flushed=False)
            self._touch([piece])
            with self._lock:
                self._written += 1
                self._nbytes += size
                self._since_scan += size
        except OSError as error:
            reason = f"cannot be written ({error.strerror or error})"
            self._count(reason, f"{self.folder} {reason}: what is read is not kept there")
        finally:
            with self._lock:
                del self._pending[piece.name]

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used files until `nbytes` more are within the limit."""
        found = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(state.st_mode):
                        found.append((state.st_mtime_ns, state.st_size, entry.path))
                    elif _LEFT.fullmatch(entry.name) and time.time() - state.st_mtime > _STALE:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + nbytes <= self._limit:
                break
            with suppress(OSError):
                os.unlink(path)
                total -= size
        with self._lock:
            self._nbytes, self._since_scan = total, 0


def _contents(path: Path, size: int) -> bytearray | str:
    """Return the bytes of a regular file of this size and user, or why it is not one. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return _NO_FILE
        if state.st_uid != os.geteuid():
            return "of another user"
        if state.st_size != size:
            return "truncated"
        data, at = bytearray(size), 0
        while at < size and (count := os.preadv(descriptor, [memoryview(data)[at:]], at)):
            at += count
        return data if at == size else "truncated"
    finally:
        os.close(descriptor)


def _difference(data: bytearray, expected: bytes) -> str:
    """Return why a file is not what its name says; "" if it is."""
    end = len(data) - hashlib.sha256().digest_size
    if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
        return "damaged"
    if data[: len(expected)] == expected:
        return ""
    if data[:8] != _MAGIC:
        return "of another format"
    return "of another model or program" if data[8:40] != expected[8:40] else "of another text"
