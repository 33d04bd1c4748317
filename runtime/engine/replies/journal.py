"""Records replies on disk while they are generated, so that an interrupted one continues with the same tokens.

A file holds the request and then one line per step: its tokens, and the number of random numbers that the reply has
taken. The line is written before the text is shown, so no client has seen more than the file holds. A killed process
loses nothing; a power cut may lose the last seconds.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from mycli.runtime.engine.sequence import FinishReason, ReplyStart, SequenceOutput
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.utils.files import try_lock

if TYPE_CHECKING:  # few replies have logprobs
    from mycli.runtime.sampling.logprobs import TokenLogprob

VERSION = 2
MAX_JOURNAL_BYTES = 64 << 20  # of all files; the oldest are removed first
MAX_SECONDS = 24 * 3600.0  # since the last write to a file
# Time, and share of the limit written, between two scans of the folder for old files: a scan reads all entries.
_SCAN_SECONDS, _SCAN_SHARE = 60.0, 16
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUFFIX = ".jsonl"
# Ends that follow from the tokens. A reply that was cancelled or failed has no end in the record, so it can continue.
_ENDS: tuple[FinishReason, ...] = ("stop", "length", "context")


class RunningReplyError(Exception):
    """Another process or another request is still writing this reply."""


def new_seed(sampling: SamplingParams) -> int:
    """Return the seed of a recorded reply: that of the request, or a random one."""
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


@dataclass(frozen=True)
class RecordedReply:
    """One reply of a file. outputs: the outputs of the engine that the file already holds."""

    writer: "ReplyWriter"
    number: int = 0
    outputs: Sequence[SequenceOutput] = ()

    def start(self, seed: int) -> ReplyStart:
        """Return where the reply continues. `seed`: of its random numbers."""
        tokens = tuple(token for output in self.outputs for token in output.tokens)
        if not self.outputs:
            return ReplyStart(seed, tokens)
        last = self.outputs[-1]
        return ReplyStart(seed, tokens, last.numbers, last.shortened)

    def append(self, output: SequenceOutput) -> None:
        self.writer.append(self.number, output)


class ReplyWriter:
    """An open file of one request. A disk error ends the recording and removes the file; the reply continues."""

    def __init__(self, path: Path, file: FileIO, lines: int = 0) -> None:
        self.path, self.lines, self._file = path, lines, file
        self._lock = Lock()  # a file must not be closed, and its number reused, while another thread writes to it

    def append(self, reply: int, output: SequenceOutput) -> None:
        """Write the output of a step; nothing for a step without tokens, or one that failed."""
        end = output.finish_reason if output.finish_reason in _ENDS else None
        if not output.tokens and end is None:
            return
        logprobs = [[entry.token, entry.logprob, entry.top] for entry in output.logprobs]
        self.write([reply, output.tokens, output.numbers, end, logprobs, output.shortened])

    def write(self, record: object) -> None:
        """Append `record` as one line, unless closed; an error of the disk removes the file."""
        # One unbuffered write per line: a killed process leaves whole lines, and `resume` cuts off a partial one. No
        # fsync: it would cost a disk access per token to protect from power cuts only.
        try:
            data = f"{json.dumps(record, separators=(',', ':'))}\n".encode()
            with self._lock:
                if self._file.write(data) != len(data):
                    raise OSError
            self.lines += 1
        except ValueError:  # closed: the reply was cancelled
            return
        except OSError:
            self.remove()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def remove(self) -> None:
        """Close and delete the file, because the reply cannot or need not be continued."""
        self.close()
        with suppress(OSError):
            self.path.unlink()


class ReplyJournal:
    """The folder of the files, readable by this user only. Several processes may share it."""

    def __init__(self, folder: Path, most_bytes: int = MAX_JOURNAL_BYTES, most_seconds: float = MAX_SECONDS) -> None:
        self.folder, self._most_bytes, self._most_seconds = folder, most_bytes, most_seconds
        self._scanned, self._since = -_SCAN_SECONDS, 0

    def begin(self, name: str, header: Mapping[str, Any]) -> ReplyWriter | None:
        """Create the file `name` with the request in `header`; None where the folder cannot be written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room()
            path = self._path(name)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        file = FileIO(descriptor, "ab")
        try_lock(descriptor)  # released by the system when the process ends, however it ends
        writer = ReplyWriter(path, file)
        writer.write({"version": VERSION, **header})
        self._since += path.stat().st_size if path.exists() else 0
        return writer

    def resume(self, name: str, replies: int) -> list[RecordedReply]:
        """Open the file `name` to append to it, and return its first `replies` replies.

        Raises RunningReplyError if it is being written, and as `header` does.
        """
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            raise self._missing(name) from None
        file = FileIO(descriptor, "ab")
        if not try_lock(descriptor):
            file.close()
            raise RunningReplyError
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        os.ftruncate(descriptor, whole)  # remove a partial last line
        outputs: list[list[SequenceOutput]] = [[] for _ in range(replies)]
        for number, output in _records(data[:whole]):
            if number < replies:
                outputs[number].append(output)
        writer = ReplyWriter(path, file, data[:whole].count(b"\n"))
        return [RecordedReply(writer, number, stored) for number, stored in enumerate(outputs)]

    def header(self, name: str) -> dict[str, Any]:
        """Return the request of the file `name`. Raises NotFoundError, UsageError for one of another version."""
        try:
            with open(self._path(name), "rb") as file:
                header = json.loads(file.readline())
        except (OSError, ValueError):
            raise self._missing(name) from None
        if not isinstance(header, dict) or header.get("version") != VERSION:
            raise UsageError(f"reply {name}: recorded by another version of mycli", "ask again")
        return header

    def names(self) -> list[str]:
        """Return the names of all files, the one written last first."""
        return [path.stem for path, _ in sorted(self._files(), key=lambda entry: -entry[1].st_mtime_ns)]

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise self._missing(name)
        return self.folder / f"{name}{_SUFFIX}"

    def _missing(self, name: str) -> NotFoundError:
        return NotFoundError(
            f"there is no interrupted reply {name[:64]!r}", "finished replies and those older than a day are not kept"
        )

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError):
                yield path, path.stat()

    def _make_room(self) -> None:
        now = time.monotonic()
        if now - self._scanned < _SCAN_SECONDS and self._since < self._most_bytes // _SCAN_SHARE:
            return
        self._scanned, self._since = now, 0
        files = sorted(self._files(), key=lambda entry: entry[1].st_mtime)
        size = sum(info.st_size for _, info in files)
        for path, info in files:
            if size <= self._most_bytes and time.time() - info.st_mtime <= self._most_seconds:
                break
            with suppress(OSError):
                path.unlink()
            size -= info.st_size


def _records(data: bytes) -> Iterator[tuple[int, SequenceOutput]]:
    # Lines after a damaged one are dropped: the reply continues from the last step that is certain.
    for line in data.splitlines()[1:]:
        try:
            number, tokens, numbers, end, logprobs, shortened = json.loads(line)
            output = SequenceOutput(
                0,
                tuple(map(int, tokens)),
                _logprobs(logprobs),
                finish_reason=end,
                numbers=int(numbers),
                shortened=bool(shortened),
            )
        except (ValueError, TypeError):
            return
        if end in (None, *_ENDS):
            yield int(number), output


def _logprobs(entries: Sequence[Any]) -> "tuple[TokenLogprob, ...]":
    if not entries:
        return ()
    from mycli.runtime.sampling.logprobs import TokenLogprob

    return tuple(
        TokenLogprob(int(token), float(logprob), tuple((int(other), float(value)) for other, value in top))
        for token, logprob, top in entries
    )
