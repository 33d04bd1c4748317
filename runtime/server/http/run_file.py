"""Files that name the running servers of this user: address, process and model.

A server holds a lock on its file as long as it runs, so a file that is not locked is left from one that was killed,
whatever process has its number now.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

from mycli.runtime.utils.files import try_lock

_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class RunningServer:
    """A server that runs on this machine. started: seconds since 1970; several: it loads its models on request."""

    pid: int
    url: str
    model: str
    names: tuple[str, ...]
    context: int
    started: int
    version: str
    several: bool = False


@contextmanager
def announced(folder: Path, server: RunningServer) -> Iterator[str]:
    """Keep a file for `server` in `folder` inside this context, and yield why there is none, "" if there is."""
    path = folder / f"{server.pid}.json"
    descriptor, problem = -1, "cannot be locked"
    try:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Locked under another name first: readers take an unlocked file for one that was left behind.
            temporary = folder / f".{server.pid}.tmp"
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if try_lock(descriptor):
                os.write(descriptor, json.dumps(asdict(server)).encode())
                os.replace(temporary, path)
                problem = ""
        except OSError as error:
            problem = error.strerror or str(error)
        yield problem
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def running_servers(folder: Path) -> list[RunningServer]:
    """Return the servers that run, the oldest first; files of others are removed."""
    servers: list[tuple[int, int, RunningServer]] = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            written = path.stat().st_mtime_ns  # tells those apart that started in the same second
            if (server := _read(path)) is not None:
                servers.append((server.started, written, server))
    return [server for *_, server in sorted(servers, key=itemgetter(0, 1))]


def is_running(folder: Path, server: RunningServer) -> bool:
    """Return whether `server` has not ended."""
    return server in running_servers(folder)


def _read(path: Path) -> RunningServer | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if try_lock(descriptor):
            path.unlink()
            return None
        values = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
        return RunningServer(
            int(values["pid"]),
            str(values["url"]),
            str(values["model"]),
            tuple(map(str, values["names"])),
            int(values["context"]),
            int(values["started"]),
            str(values["version"]),
            bool(values.get("several")),
        )
    finally:
        os.close(descriptor)
