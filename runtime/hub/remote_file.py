"""Reads the files of a commit on a hub by byte ranges, and caches recent ranges on disk within a limit."""

import hashlib
import shutil
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.stable_file import StoredFile
from mycli.runtime.errors import GateError, ModelError, UserError
from mycli.runtime.hub.client import RESUMABLE, Hub, TransientError
from mycli.runtime.utils.files import disk_errors

_Key = tuple[str, int, int]  # digest of the file, offset, count


def fetch_range(hub: Hub, repo: str, commit: str, name: str, offset: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a file from `offset`, continuing after dropped connections.

    Raises ModelError if the server sends whole files only, and what `Hub.open` and `RetryPolicy.run` raise.
    """
    done = 0

    def attempt() -> None:
        nonlocal done
        with hub.open(repo, commit, name, offset + done, offset + len(view) - 1) as response:
            # 200 means that the server ignores ranges: every tensor would cost a transfer of the whole file.
            if response.status_code != 206:
                message = f"{response.url.host} does not send parts of {name}"
                raise ModelError(message, code="pull-then-quantize")
            if not response.headers.get("Content-Range", "").startswith(f"bytes {offset + done}-"):
                raise TransientError(f"{response.url.host} sends another part of {name} than was requested")
            for chunk in response.iter_bytes():
                part = chunk[: len(view) - done]
                view[done : done + len(part)] = part
                done += len(part)
                if done == len(view):
                    return
            raise TransientError(f"{response.url.host} sent {done} of {len(view)} bytes of a part of {name}")

    hub.policy.run(attempt, hub.note, lambda: done)


class RangeSpool:
    """A disk cache of ranges of the files of one commit: at most `limit` bytes, least recently read ones deleted first.

    Safe to use from several threads. Raises GateError if a range has other contents when it is fetched again.
    """

    def __init__(self, hub: Hub, repo: str, commit: str, folder: Path) -> None:
        self.limit = 0
        self._hub, self._repo, self._commit, self._folder = hub, repo, commit, folder
        self._stored: OrderedDict[_Key, Path] = OrderedDict()
        self._coming: dict[_Key, Future[None]] = {}
        self._digests: dict[_Key, bytes] = {}
        self._emptied = False
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(1)  # one transfer ahead hides the latency; more would share the bandwidth

    def read_into(self, file: "RemoteFile", view: memoryview, offset: int) -> None:
        key = (file.digest, offset, len(view))
        with self._lock:
            coming = self._coming.get(key)
        if coming is not None:
            with suppress(UserError):  # the fetch below tries again, and raises an error that persists
                coming.result()
        if not self._read_stored(key, view):
            self._fetch(file, key, view)

    def prefetch(self, file: "RemoteFile", offset: int, count: int) -> None:
        """Start fetching a range in the background, unless the limit leaves no room for it."""
        key = (file.digest, offset, count)
        with self._lock:
            # At most half of the limit is fetched ahead, so that it does not push out ranges that are still to be read.
            waiting = sum(size for _, _, size in self._coming)
            if key in self._stored or key in self._coming or waiting + count > self.limit // 2:
                return
            self._coming[key] = self._background.submit(self._fetch_ahead, file, key)

    def _fetch_ahead(self, file: "RemoteFile", key: _Key) -> None:
        try:
            self._fetch(file, key, memoryview(bytearray(key[2])))
        finally:
            with self._lock:
                self._coming.pop(key, None)

    def _fetch(self, file: "RemoteFile", key: _Key, view: memoryview) -> None:
        fetch_range(self._hub, self._repo, self._commit, file.name, key[1], view)
        # The hub has hashes of whole files only. Comparing a range with its first transfer at least detects a server
        # that changes the file during the run.
        digest = hashlib.blake2b(view, digest_size=16).digest()
        with self._lock:
            if self._digests.setdefault(key, digest) != digest:
                raise GateError(f"{file.name}: the server sent two different contents", RESUMABLE)
            if key[2] <= self.limit:
                self._store(key, view)

    def _read_stored(self, key: _Key, view: memoryview) -> bool:
        with self._lock:
            path = self._stored.get(key)
            if path is None:
                return False
            self._stored.move_to_end(key)
            done = 0
            with suppress(FileNotFoundError), path.open("rb", buffering=0) as stream:
                while done < len(view) and (count := stream.readinto(view[done:])):
                    done += count
            return done == len(view)

    def _store(self, key: _Key, view: memoryview) -> None:
        if key in self._stored:
            return
        while self._stored and sum(size for _, _, size in self._stored) + key[2] > self.limit:
            self._stored.popitem(last=False)[1].unlink(missing_ok=True)
        path = self._folder / f"{key[0][:16]}-{key[1]}-{key[2]}"
        with disk_errors(self._folder):
            if not self._emptied:  # of the ranges of a killed process, maybe incomplete, which no limit counts
                shutil.rmtree(self._folder, ignore_errors=True)
                self._emptied = True
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(view)
        self._stored[key] = path

    def close(self) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class RemoteFile(StoredFile):
    """A file on a hub; `digest` as in `HubFile`."""

    digest: str
    spool: RangeSpool

    def read_into(self, view: memoryview, offset: int, cancelled: threading.Event | None = None) -> None:
        if cancelled is not None and cancelled.is_set():
            raise CancelledError
        if view:
            self.spool.read_into(self, view, offset)

    def prefetch(self, offset: int, count: int) -> None:
        if count:
            self.spool.prefetch(self, offset, count)
