"""Runs a server for several models: the router process and its list of models."""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from mycli.cli.command import Call, command_line
from mycli.cli.flags.address import AddressFlags
from mycli.cli.flags.options import KEY_VARIABLE
from mycli.cli.flags.several import SeveralModelsFlags
from mycli.cli.serving.local_server import listed
from mycli.cli.serving.model_catalog import Catalog, ModelRequest, requested_models
from mycli.runtime.server.http.connection import DrainingServer, run_until_signal
from mycli.runtime.server.http.run_file import RunningServer
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.router.application import Router, router_application
from mycli.runtime.server.router.management import ModelManager
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.pool import ModelPool
from mycli.runtime.server.router.process import ModelProcess, child_environment
from mycli.runtime.utils import version
from mycli.runtime.utils.files import expand_user
from mycli.runtime.utils.units import human_bytes, pluralize


def serve_several(
    call: Call,
    names: Sequence[str],
    settings: ServerSettings,
    address: AddressFlags,
    several: SeveralModelsFlags,
    words: Sequence[str],
    log: Callable[[str], None],
) -> None:
    """Serve models until a signal; `words`: options for the server of each. Raises UserError."""
    requests = requested_models(names, several)
    listener, url = address.listen()
    try:
        # A folder that only this user may enter: the processes behind the sockets check no key.
        with tempfile.TemporaryDirectory(prefix="mycli-") as sockets:
            catalog = Catalog(call, address, several, words, Path(sockets))
            models, rooms = catalog.routed(requests)
            created = int(time.time())
            models = [replace(model, created=created) for model in models]
            settings = replace(settings, names=tuple(name for model in models for name in model.names))
            environment = child_environment((KEY_VARIABLE, f"MYCLI_SERVE_{KEY_VARIABLE}"))

            async def start(model: RoutedModel) -> ModelProcess:
                return await ModelProcess.start(model, environment, call.out.log)

            pool = ModelPool(models, rooms, settings.limits, start, call.out.warn)
            router = Router(settings, pool, _manager(catalog, rooms, environment) if several.manages else None)

            def drain() -> None:
                router.draining = True
                if router.busy:
                    replies = pluralize(max(router.requests, pool.active), "reply")
                    call.out.note(f"stopping after {replies}; press Ctrl-C again to stop now")

            def ready() -> None:
                _announce(call, url, models, rooms)
                pool.start_pinned()

            app = router_application(router, log)
            server = DrainingServer(app, settings.limits, drain, lambda: router.busy, lambda: None)
            context = max(model.context for model in models)
            record = RunningServer(os.getpid(), url, router.name, settings.names, context, created, version(), True)
            with listed(call, record):
                run_until_signal(server, listener, ready, pool.close)
    finally:
        address.close(listener)
        if address.unix_socket is not None:
            expand_user(address.unix_socket).unlink(missing_ok=True)


def _manager(catalog: Catalog, rooms: dict[str, int], environment: Mapping[str, str]) -> ModelManager:
    program = command_line()
    numbers = count(1)

    def describe(name: str) -> RoutedModel:
        # A new number: the name may be that of an earlier model, whose process still has its socket.
        model = catalog.routed_model(ModelRequest(Path(name).name, name, {}), f"pulled-{next(numbers)}", rooms)
        return replace(model, created=int(time.time()))

    return ModelManager(
        pull=lambda name: (*program, "pull", "--json", "--", name),
        remove=lambda name: (*program, "rm", "--yes", "--json", "--", name),
        describe=describe,
        environment=environment,
    )


def _announce(call: Call, url: str, models: Sequence[RoutedModel], rooms: dict[str, int]) -> None:
    described = [
        {
            "model": model.name,
            "context": model.context,
            "memory_bytes": model.nbytes,
            "place": model.place,
            "pinned": model.pinned,
            "error": model.problem or None,
        }
        for model in models
    ]
    if call.out.json_mode:
        call.out.json_record({"url": url, "models": described, "memory_bytes": rooms})
        return
    places = ", ".join(f"{human_bytes(nbytes)} of {place}" for place, nbytes in rooms.items())
    call.out.result(f"{url} · {pluralize(len(models), 'model')}, loaded on request · up to {places}")
    for model in models:
        needs = model.problem or f"{human_bytes(model.nbytes)}, context {model.context}"
        call.out.note(f"  {model.name}: {needs}{' · pinned' if model.pinned else ''}")
