"""`mycli ps`: the servers that run on this machine."""

import time
from dataclasses import asdict
from typing import Any

from mycli.cli.command import Call, command
from mycli.cli.output import Column
from mycli.cli.serving.local_server import request_json
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.http.run_file import RunningServer, running_servers

EXAMPLES = ("mycli ps", "mycli ps --json")
_SECONDS = 0.5  # to wait for the state of one server
_COLUMNS = (
    Column("pid", "pid", right=True),
    Column("address", "url"),
    Column("model", lambda server: _models(server)),
    Column("context", "context", right=True),
    Column("up", lambda server: _duration(server["seconds"]), right=True),
    Column("state", "state"),
    Column("running", "running", right=True),
    Column("waiting", "waiting", right=True),
)


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _models(server: dict[str, Any]) -> str:
    # Of a server for several models those in memory, and how many there are.
    states = server["models"]
    if not states:
        return str(server["model"])
    shown = [
        name if state == "loaded" else f"{name} ({state})" for name, state in states.items() if state != "unloaded"
    ]
    shown += [f"{len(states)} models"] * (len(shown) < len(states))
    return ", ".join(shown)


@command
def ps(call: Call) -> None:
    """List the servers that run on this machine.

    These are the servers that this user has started with mycli serve. Of a server for several models the loaded ones
    are shown; --json prints the state of all.
    """
    servers = [_describe(server) for server in running_servers(state_dir() / "servers")]
    if not servers and not call.out.json_mode:
        call.out.note("no server is running; start one: mycli serve MODEL")
        return
    call.out.show({"servers": servers}, _COLUMNS, rows="servers")


def _describe(server: RunningServer) -> dict[str, Any]:
    _, health = request_json(server.url, "GET", "/health", seconds=_SECONDS)
    return {
        **asdict(server),
        "seconds": max(int(time.time()) - server.started, 0),
        "state": health.get("status", "no answer"),
        "running": health.get("running"),
        "waiting": health.get("waiting"),
        "models": health.get("models", {}),  # name -> state, of a server for several models
    }
