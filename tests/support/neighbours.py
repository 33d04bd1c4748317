"""Attacks a server process and measures how long another client waits, and how much memory the server uses."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Attack:
    """Holds requests that are sent concurrently: a path and the body, as bytes or as a value.

    pieces: instead of a request, what is written to the connection, with a pause after each.
    """

    path: str
    body: Any = None
    copies: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes] = ()
    pause: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Holds an attack's statuses and seconds, the waits of another client, and the memory growth in bytes.

    alone: seconds of the other client's request before the attack; wait: the longest during it.
    """

    statuses: Sequence[int]
    seconds: float
    alone: float
    wait: float
    grown: int

    def row(self, name: str) -> str:
        statuses = ", ".join(map(str, sorted(set(self.statuses))))
        return f"| {name} | {statuses} | {self.seconds:.2f} s | {self.grown / 2**20:.0f} MiB | {self.wait:.2f} s |"


def _ask(port: int, path: str, data: bytes, headers: Mapping[str, str] | None = None, seconds: float = 120) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def _write(port: int, pieces: Sequence[bytes], pause: float, seconds: float = 120) -> list[int]:
    """Write to a connection until the server closes it or all is answered; return the statuses in its answers."""
    answers = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answers += part
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3})", answers)]


def _pids(root: int) -> Iterator[int]:
    """Yield the ids of the process and its descendants."""
    yield root
    with suppress(FileNotFoundError, ProcessLookupError):  # a process or thread that has ended meanwhile
        for task in list(Path(f"/proc/{root}/task").iterdir()):
            with suppress(FileNotFoundError, ProcessLookupError):
                for child in (task / "children").read_text().split():
                    yield from _pids(int(child))


class ServerProcess:
    def __init__(self, port: int, pid: int) -> None:
        self.port, self._pid = port, pid

    def resident(self) -> int:
        total = 0
        for pid in list(_pids(self._pid)):
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            total += pages * os.sysconf("SC_PAGE_SIZE")
        return total

    def neighbour(self) -> float:
        body = {"prompt": "The capital of", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        assert _ask(self.port, "/v1/completions", json.dumps(body).encode()) == 200
        return time.perf_counter() - start

    def suffer(self, attack: Attack) -> Outcome:
        data = attack.body if isinstance(attack.body, bytes) else json.dumps(attack.body).encode()
        before, alone, statuses = self.resident(), self.neighbour(), list[int]()
        start = time.perf_counter()

        def send() -> None:
            if attack.pieces:
                statuses.extend(_write(self.port, attack.pieces, attack.pause))
            else:
                statuses.append(_ask(self.port, attack.path, data, attack.headers))

        threads = [threading.Thread(target=send) for _ in range(attack.copies)]
        for thread in threads:
            thread.start()
        peak, over = [before], threading.Event()

        def watch() -> None:
            while not over.wait(0.005):
                peak[0] = max(peak[0], self.resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        wait = self.neighbour()
        while any(thread.is_alive() for thread in threads):
            wait = max(wait, self.neighbour())
        seconds = time.perf_counter() - start
        over.set()
        watcher.join()
        return Outcome(statuses, seconds, alone, wait, peak[0] - before)


@contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "mycli.cli", "serve", "pico", "--port", "0", "--json", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert child.stdout
        port = int(json.loads(child.stdout.readline())["url"].rpartition(":")[2])
        server = ServerProcess(port, child.pid)
        server.neighbour()
        yield server
    finally:
        child.terminate()
        child.wait(60)
