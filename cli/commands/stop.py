"""`mycli stop`: ends a server that runs on this machine."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.options import KEY_VARIABLE
from mycli.cli.serving.local_server import request_json
from mycli.runtime.errors import NotFoundError, ResourceError, UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.http.run_file import RunningServer, is_running, running_servers

EXAMPLES = ("mycli stop pico", "mycli stop --all")
_UNLOAD_SECONDS = 10.0  # to answer
TICK = 0.05  # seconds between two looks at a server that ends


@command
def stop(
    call: Call,
    server: Annotated[str | None, options.argument("SERVER", "Model name, port or process id.")] = None,
    *,
    everything: Annotated[bool, options.flag("--all", "Stop all servers.")] = False,
    now: Annotated[bool, options.flag("--now", "Do not wait for replies under way.")] = False,
) -> None:
    """Stop a server, or unload one model of a server for several.

    Without SERVER, the only one that runs. The server finishes its replies first, for as long as its --grace says. The
    command returns when it has ended.
    """
    folder = state_dir() / "servers"
    chosen = _choose(running_servers(folder), server, everything)
    if server is not None and len(chosen) == 1 and chosen[0].several and server in chosen[0].names:
        _unload(call, chosen[0], server)
        return
    for target in chosen:
        _stop(folder, target, now)
    if not call.out.answered({"stopped": [target.pid for target in chosen]}):
        for target in chosen:
            call.out.result(f"stopped {target.model} at {target.url} (process {target.pid})")


def _unload(call: Call, server: RunningServer, model: str) -> None:
    status, answer = request_json(server.url, "POST", "/v1/models/unload", {"model": model}, seconds=_UNLOAD_SECONDS)
    if status != 200:
        cause = answer.get("error", {}).get("message", "it does not answer")
        hint = f"set {KEY_VARIABLE} to the key of the server" if status == 401 else f"stop it: mycli stop {server.pid}"
        raise ResourceError(f"{server.url} did not unload {model}: {cause}", hint)
    if not call.out.answered({"stopped": [], "unloaded": [model]}):
        call.out.result(f"{model} is unloaded after its requests; the server at {server.url} keeps running")


def _choose(servers: Sequence[RunningServer], name: str | None, everything: bool) -> Sequence[RunningServer]:
    if name is not None and everything:
        raise UsageError("--all takes no SERVER", "omit --all, or SERVER")
    matching = [server for server in servers if name is None or name in _labels(server)]
    if not matching and not everything:
        cause = "no server is running" if not servers else f"no server is called {name!r:.100}"
        raise NotFoundError(cause, "mycli ps lists the servers that run")
    if len(matching) > 1 and not everything:
        ports = ", ".join(str(_port(server) or server.pid) for server in matching)
        raise UsageError(f"{len(matching)} servers match", f"name one by its port: {ports}; or stop all: --all")
    return matching


def _labels(server: RunningServer) -> set[str]:
    return {server.url, server.model, *server.names, str(server.pid), str(_port(server))}


def _port(server: RunningServer) -> int | None:
    return None if server.url.startswith("unix:") else urlsplit(server.url).port


def _stop(folder: Path, server: RunningServer, now: bool) -> None:
    signals = 2 if now else 1  # the second one does not wait for replies
    for _ in range(signals):
        try:
            os.kill(server.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            raise ResourceError(f"process {server.pid} belongs to another user", "stop it as that user") from None
        time.sleep(TICK)
    while is_running(folder, server):
        time.sleep(TICK)
