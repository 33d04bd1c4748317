"""Lists a server for `mycli ps`, and sends requests to one on this machine, by HTTP on a port or a Unix socket."""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from mycli.cli.command import Call
from mycli.cli.flags.options import KEY_VARIABLE
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.http.run_file import RunningServer, announced

_MAX_BYTES = 1 << 20


@contextmanager
def listed(call: Call, server: RunningServer) -> Iterator[None]:
    """List `server` for other commands inside this context; warn if that is not possible."""
    folder = state_dir() / "servers"
    with announced(folder, server) as problem:
        if problem:
            call.out.warn(f"{folder}: {problem}: this server is listed by neither mycli ps nor mycli stop")
        yield


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request_json(url: str, method: str, path: str, body: Any = None, *, seconds: float) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of a response; 0 and {} if there is none. Reads the API key from the environment."""
    if url.startswith("unix:"):
        connection: http.client.HTTPConnection = _UnixConnection(url.removeprefix("unix:"), seconds)
    else:
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=seconds)
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE, "").strip():
        headers["authorization"] = f"Bearer {key}"
    try:
        with suppress(OSError, ValueError, http.client.HTTPException):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read(_MAX_BYTES))
            if isinstance(answer, dict):
                return response.status, answer
        return 0, {}
    finally:
        connection.close()
