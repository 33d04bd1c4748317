"""Starts a server in another process, lists servers for `mycli ps`, and sends requests to one on this machine.

Requests are HTTP on a port or a Unix socket.
"""

import http.client
import json
import os
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any
from urllib.parse import urlsplit

from mycli.cli.command import Call, command_line
from mycli.cli.flags.options import KEY_VARIABLE
from mycli.runtime.errors import ModelError, NotFoundError, ResourceError, UsageError, UserError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.http.run_file import RunningServer, announced

_MAX_BYTES = 1 << 20
_WARNING = "warning: "
_STOP_SECONDS = 60  # after SIGTERM, for replies under way; the server itself waits for half as long


@contextmanager
def listed(call: Call, server: RunningServer) -> Iterator[None]:
    """List `server` for other commands inside this context; warn if that is not possible."""
    folder = state_dir() / "servers"
    with announced(folder, server) as problem:
        if problem:
            call.out.warn(f"{folder}: {problem}: this server is listed by neither mycli ps nor mycli stop")
        yield


@contextmanager
def started_server(call: Call, model: str, *flags: str, quiet: bool = False) -> Iterator[dict[str, Any]]:
    """Serve `model` in another process inside this context; yield what it announces: its `url` and its `model`.

    Its notes and warnings are shown, with `quiet` only until it serves. The process ends when its standard input
    closes, so none is left if this one is killed. Raises the error that it ended with.
    """
    line = command_line("serve", model, "--port", "0", "--json", "--end-with-stdin", *flags)
    pipe = subprocess.PIPE
    # Both outputs in one pipe: what the server says before it serves comes before the announcement.
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True) as child:
        assert child.stdout is not None
        rest = threading.Thread(target=_relay, args=(child.stdout, None if quiet else call))
        try:
            answer = _announcement(child.stdout, call)
            if "url" not in answer:
                raise _error_of(model, answer.get("error"))
            rest.start()
            yield answer
        finally:
            child.terminate()
            try:
                child.wait(_STOP_SECONDS)  # its pipe closes after that: a second signal, which cuts replies off
            except subprocess.TimeoutExpired:
                child.kill()
            if rest.is_alive():
                rest.join()


def _announcement(lines: IO[bytes], call: Call) -> dict[str, Any]:
    # The JSON with the address or the error, {} if the process ends without; shows the lines before it.
    for line in lines:
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and ("url" in answer or "error" in answer):
                return answer
        _show(line, call)
    return {}


def _relay(lines: IO[bytes], call: Call | None) -> None:
    # Reads to the end: a full pipe would block the server.
    for line in lines:
        if call is not None:
            with suppress(BrokenPipeError):
                _show(line, call)


def _show(line: bytes, call: Call) -> None:
    text = line.decode("utf-8", "replace").rstrip()
    if text.startswith(_WARNING):
        call.out.warn(text.removeprefix(_WARNING))
    else:
        call.out.note(text)


def _error_of(model: str, error: Any) -> UserError:
    # The error that a process announced instead of an address.
    if not isinstance(error, dict):
        return ResourceError(f"{model}: its server ended", f"look closer: mycli serve {shlex.quote(model)}")
    kinds: tuple[type[UserError], ...] = (UsageError, ModelError, NotFoundError)
    kind = next((kind for kind in kinds if kind.exit_code == error.get("exit_code")), ResourceError)
    return kind(str(error.get("message")), str(error.get("hint", "")))


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
