"""`mycli serve`: one model for many clients, over the protocols of OpenAI and Anthropic, with a page."""

import ipaddress
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import FULL_LENGTH, KeepFlags, LoadFlags
from mycli.cli.load import load_engine
from mycli.cli.other_engines import EngineFlags, OtherEngine, start
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError
from mycli.runtime.server.settings import ServerLimits, ServerSettings
from mycli.runtime.utils.files import read_input
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:
    from socket import socket

    from mycli.runtime.open import OpenedModel

EXAMPLES = (
    "mycli serve pico",
    "mycli serve pico --port 9000 --alias gpt-4o-mini --ctx 1k",
)
MAX_KEY_BYTES = 4096


@dataclass(frozen=True)
class AddressFlags:
    """Where the server listens, and who may come."""

    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0: any free one.")
    ] = 8080
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", metavar="FILE", help=f"Ask clients for this key; or set {options.KEY_VARIABLE}."
        ),
    ] = None
    open_to_all: Annotated[bool, typer.Option("--insecure-no-auth", help="Let other machines in without a key.")] = (
        False
    )
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="A host name that clients use for the server; may be repeated."
        ),
    ] = None
    origins: Annotated[
        list[str] | None,
        typer.Option("--cors", metavar="ORIGIN", help="Let pages of this origin use the server; may be repeated."),
    ] = None
    aliases: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", metavar="NAME", help="Name of the model for clients; may be repeated, the first is shown."
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            max=3600,
            help="Seconds that replies have to finish when the server is told to stop.",
        ),
    ] = 30.0
    waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting", metavar="N", min=1, max=100_000, help="Most replies that may wait; more are refused."
        ),
    ] = 256

    def resolve(self, call: Call) -> ServerSettings:
        """What was asked, without the model's own name. Raises UsageError for what is not safe or cannot be."""
        key = self._key(call)
        if key is None and not self.open_to_all and not _loopback(self.host):
            raise UsageError(
                f"--host {self.host} lets other machines in, and there is no key",
                "give --api-key-file FILE, or say --insecure-no-auth",
            )
        for origin in self.origins or ():
            if origin.count("://") != 1 or origin.endswith("/") or origin == "*":
                raise UsageError(f"--cors {origin}: not an origin", "write it as https://example.org")
        for name in self.aliases or ():
            if not 0 < len(name) <= 256 or not name.isprintable():
                raise UsageError(f"--alias {name[:60]!r}: not a name", "1 to 256 printable characters")
        hosts = tuple(name.lower() for name in (*(self.hosts or ()), self.host))
        limits = ServerLimits(grace_seconds=self.grace, waiting=self.waiting)
        return ServerSettings(tuple(self.aliases or ()), key, hosts, tuple(self.origins or ()), limits)

    def _key(self, call: Call) -> bytes | None:
        """The key, from the file or the environment: never from the command line, which others can see."""
        if self.key_file is None:
            given = os.environ.get(options.KEY_VARIABLE, "").strip().encode()
            source = options.KEY_VARIABLE
        else:
            given = read_input(self.key_file, MAX_KEY_BYTES).strip()
            source = str(self.key_file)
            if self.key_file.stat().st_mode & 0o077:
                call.out.warn(f"{source} can be read by other users: chmod 600 {source}")
            if not given:
                raise UsageError(f"{source}: the file is empty", "write a key to it: openssl rand -hex 32")
        if not given.isascii() or b"\n" in given or b" " in given:
            raise UsageError(f"{source}: a key is one line of ASCII without spaces", "openssl rand -hex 32 makes one")
        return given or None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@command
def serve(
    call: Call,
    model: options.Model,
    address: AddressFlags,
    together: Annotated[
        int,
        typer.Option(
            "--max-sequences", metavar="N", min=1, max=4096, help="Replies made at once; they share the cache."
        ),
    ] = 32,
    *,
    other: EngineFlags,
    kept: KeepFlags,
    loading: LoadFlags,
) -> None:
    """Serve a model over HTTP, with a page to talk with it.

    It speaks OpenAI's and Anthropic's interfaces, and has metrics. What one GPU does not hold --engine vllm or sglang
    serves, where that is installed: the command becomes their server of the same folder.

    Replies that are under way when it is told to stop (SIGTERM, Ctrl-C) are finished first; a second signal ends it at
    once. What was asked and answered is not logged; -v shows a line for each request.
    """
    settings = address.resolve(call)
    asked = kept.added(loading.resolve(min(together, FULL_LENGTH), together))
    engine = other.resolve()
    if engine is not None:
        _refuse_ours(engine, address, asked)
        named = replace(settings, names=settings.names or (Path(model).name,))
        start(call, engine, model, asked, named, address.host, address.port, other.ranks)
    _require()
    from mycli.runtime.server.connection import listen

    listener = listen(address.host, address.port)  # before anything is loaded
    try:
        loaded = load_engine(call, model, asked)
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        _run(call, settings, loaded, together, listener, url)
    finally:
        listener.close()


def _refuse_ours(engine: OtherEngine, address: AddressFlags, asked: EngineConfig) -> None:
    """Raises UsageError for what is asked for and only our own server does."""
    usual = AddressFlags()
    ours = {
        "--allow-host": bool(address.hosts),
        "--grace": address.grace != usual.grace,
        "--max-waiting": address.waiting != usual.waiting,
        "--draft": asked.draft is not None,
        "--adapter": asked.adapter is not None,
        "--shadow": asked.dense_prefill_copy,
        "--allow-nonfinite": asked.allow_nonfinite,
        "--prefix-cache-dir": asked.prefix_folder is not None,
    }
    for flag, given in ours.items():
        if given:
            raise UsageError(f"{flag} applies to our own server, not to {engine.title}", "omit it, or omit --engine")


def _require() -> None:
    try:
        import prometheus_client  # noqa: F401  # to see whether it is there
        import starlette  # noqa: F401  # the same
        import uvicorn  # noqa: F401  # the same
    except ImportError as error:
        raise UsageError(
            f"serving needs {error.name}, which is not installed", "pip install 'mycli-llm[serve]'"
        ) from None


def _run(
    call: Call, settings: ServerSettings, loaded: "OpenedModel", together: int, listener: "socket", url: str
) -> None:
    from mycli.runtime.server.application import application
    from mycli.runtime.server.connection import DrainingServer, run_until_signal
    from mycli.runtime.server.service import Service
    from mycli.runtime.server.worker import EngineWorker

    settings = replace(settings, names=(*settings.names, Path(loaded.source.name).name))
    engine = loaded.engine
    sequences = engine.shape.blocks * engine.shape.block_size // engine.context
    worker = EngineWorker(engine, settings.limits.waiting, call.out.warn)
    service = Service(settings, loaded.model, worker, int(time.time()))

    def drain() -> None:
        service.draining = True
        if worker.underway:
            call.out.note(f"stopping: {pluralize(worker.underway, 'reply')} to finish first; again to stop at once")

    def ready() -> None:
        room = f"room for {sequences} of {engine.context} tokens"
        answer = {
            "url": url,
            "model": service.name,
            "context": engine.context,
            "sequences": together,
            "full_length": sequences,
        }
        if call.out.json_mode:
            call.out.json_record(answer)
        else:
            call.out.result(f"{url} · {service.name} · {pluralize(together, 'reply')} at once, {room}")

    server = DrainingServer(
        application(service, call.out.detail), settings.limits, drain, lambda: worker.underway > 0, worker.cancel_all
    )
    worker.start()
    try:
        run_until_signal(server, listener, ready)
    finally:
        worker.stop()
        engine.close()
        service.close()
