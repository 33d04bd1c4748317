"""`mycli ps`: the servers that run on this machine."""

import http.client
import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from mycli.cli.command import Call, command
from mycli.cli.output import Column
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.run_file import RunningServer, running_servers

EXAMPLES = ("mycli ps", "mycli ps --json")
_SECONDS = 0.5  # to wait for the state of one server
_COLUMNS = (
    Column("pid", "pid", right=True),
    Column("address", "url"),
    Column("model", "model"),
    Column("context", "context", right=True),
    Column("up", lambda server: _duration(server["seconds"]), right=True),
    Column("state", "state"),
    Column("running", "running", right=True),
    Column("waiting", "waiting", right=True),
)


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


@command
def ps(call: Call) -> None:
    """List the servers that run on this machine.

    These are the servers that this user has started with mycli serve.
    """
    servers = [_describe(server) for server in running_servers(state_dir() / "servers")]
    if not servers and not call.out.json_mode:
        call.out.note("no server is running; start one: mycli serve MODEL")
        return
    call.out.show({"servers": servers}, _COLUMNS, rows="servers")


def _describe(server: RunningServer) -> dict[str, Any]:
    health = _health(server.url)
    return {
        **asdict(server),
        "seconds": max(int(time.time()) - server.started, 0),
        "state": health.get("status", "no answer"),
        "running": health.get("running"),
        "waiting": health.get("waiting"),
    }


def _health(url: str) -> dict[str, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_SECONDS)
    try:
        with suppress(OSError, ValueError, http.client.HTTPException):
            connection.request("GET", "/health")
            answer = json.loads(connection.getresponse().read(1 << 16))
            if isinstance(answer, dict):
                return answer
        return {}
    finally:
        connection.close()
