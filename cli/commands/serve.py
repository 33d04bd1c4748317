"""`mycli serve`: a model over HTTP with OpenAI and Anthropic APIs, metrics and a web page."""

import ipaddress
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import FULL_LENGTH, LoadFlags, PrefixCacheFlags
from mycli.cli.load import announce_slow_passes, load_engine
from mycli.cli.other_engines import EngineFlags, OtherEngine, start
from mycli.cli.reasons import passes_json
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.request_log import LogFormat
from mycli.runtime.server.run_file import RunningServer, announced
from mycli.runtime.server.settings import ServerLimits, ServerSettings
from mycli.runtime.utils import version
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
    """Address, access and limits of the server, as typed."""

    host: Annotated[str, options.option("--host", "ADDRESS", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, options.option("--port", "N", "Port to listen on; 0: a free one.", min=0, max=65535)] = 8080
    key_file: Annotated[
        Path | None,
        options.option("--api-key-file", "FILE", f"Require the API key in this file; or set {options.KEY_VARIABLE}."),
    ] = None
    open_to_all: Annotated[bool, options.flag("--insecure-no-auth", "Allow other machines without an API key.")] = False
    hosts: Annotated[
        list[str] | None, options.option("--allow-host", "NAME", "Also accept requests for this host name; repeatable.")
    ] = None
    origins: Annotated[
        list[str] | None, options.option("--cors", "ORIGIN", "Allow web pages of this origin; repeatable.")
    ] = None
    aliases: Annotated[
        list[str] | None,
        options.option("--alias", "NAME", "Another model name for clients; repeatable; the first is shown."),
    ] = None
    grace: Annotated[
        float,
        options.option("--grace", "SECONDS", "Seconds to finish replies after Ctrl-C or SIGTERM.", min=0, max=3600),
    ] = 30.0
    reasoning_budget: Annotated[
        int | None,
        options.count(
            "--reasoning-budget",
            "Close the reasoning of a reply after N tokens, unless the request sets a budget.",
            show_default="no limit",
        ),
    ] = None
    log_format: Annotated[
        str | None,
        options.words("--log-format", ("text", "json"), "Log one line per request.", show_default="text with -v"),
    ] = None
    no_record: Annotated[
        bool, options.flag("--no-record", "Do not record replies on disk, from which they can be resumed.")
    ] = False
    waiting: Annotated[
        int,
        options.option("--max-waiting", "N", "Maximum queue length; further requests are refused.", min=1, max=100_000),
    ] = 256

    extra_properties: Annotated[
        bool, options.flag("--extra-properties", "Allow JSON properties that a schema does not name.")
    ] = False

    def resolve(self, call: Call) -> ServerSettings:
        """Return the settings, without the model's name. Raises UsageError for unsafe or invalid values."""
        key = self._key(call)
        if key is None and not self.open_to_all and not _loopback(self.host):
            raise UsageError(
                f"--host {self.host} allows other machines, but no API key is set",
                "add --api-key-file FILE, or --insecure-no-auth",
            )
        for origin in self.origins or ():
            if origin.count("://") != 1 or origin.endswith("/") or origin == "*":
                raise UsageError(f"--cors {origin}: not an origin", "for example: --cors https://example.org")
        for name in self.aliases or ():
            if not 0 < len(name) <= 256 or not name.isprintable():
                raise UsageError(f"--alias {name[:60]!r}: not a valid name", "use 1 to 256 printable characters")
        hosts = tuple(name.lower() for name in (*(self.hosts or ()), self.host))
        limits = ServerLimits(grace_seconds=self.grace, waiting=self.waiting)
        log_format = options.choice("--log-format", self.log_format or "text", get_args(LogFormat))
        return ServerSettings(
            tuple(self.aliases or ()),
            key,
            hosts,
            tuple(self.origins or ()),
            self.extra_properties,
            limits,
            log_format,
            self.reasoning_budget,
            None if self.no_record else state_dir() / "replies",
        )

    def _key(self, call: Call) -> bytes | None:
        # Never from the command line, which other users of the machine can read.
        if self.key_file is None:
            key = os.environ.get(options.KEY_VARIABLE, "").strip().encode()
            source = options.KEY_VARIABLE
        else:
            key = read_input(self.key_file, MAX_KEY_BYTES).strip()
            source = str(self.key_file)
            if self.key_file.stat().st_mode & 0o077:
                call.out.warn(f"{source} is readable by other users; run: chmod 600 {source}")
            if not key:
                raise UsageError(f"{source} is empty", f"write a key to it: openssl rand -hex 32 > {source}")
        if not key.isascii() or b"\n" in key or b" " in key:
            raise UsageError(
                f"{source}: a key must be one line of ASCII without spaces", "make one: openssl rand -hex 32"
            )
        return key or None


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
    max_sequences: Annotated[
        int,
        options.option(
            "--max-sequences", "N", "Replies generated concurrently; they share the cache.", min=1, max=4096
        ),
    ] = 32,
    *,
    other: EngineFlags,
    prefix_cache: PrefixCacheFlags,
    loading: LoadFlags,
) -> None:
    """Serve a model over HTTP, with an API and a web page.

    Provides the OpenAI and Anthropic APIs, metrics, and a page to chat. For models too large for one GPU, use --engine
    vllm or sglang: the command then starts that server on the same folder.

    On Ctrl-C or SIGTERM the server finishes its replies first; a second signal stops it immediately. Prompts and
    replies are not logged; -v prints a line for each request. mycli ps and mycli stop list and stop servers.
    """
    settings = address.resolve(call)
    config = prefix_cache.resolve(loading.resolve(min(max_sequences, FULL_LENGTH), max_sequences))
    engine = other.resolve()
    if engine is not None:
        _refuse_own_options(engine, address, config)
        named = replace(settings, names=settings.names or (Path(model).name,))
        start(call, engine, model, config, named, address.host, address.port, other.ranks)
    _require()
    from mycli.runtime.server.connection import listen

    listener = listen(address.host, address.port)  # before loading, which may take minutes
    try:
        loaded = load_engine(call, model, config)
        announce_slow_passes(call, loaded.model.runner)
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        log = call.out.detail if address.log_format is None else call.out.log
        _run(call, settings, loaded, max_sequences, listener, url, log)
    finally:
        listener.close()


def _refuse_own_options(engine: OtherEngine, address: AddressFlags, config: EngineConfig) -> None:
    default = AddressFlags()
    used = {
        "--allow-host": bool(address.hosts),
        "--grace": address.grace != default.grace,
        "--max-waiting": address.waiting != default.waiting,
        "--log-format": address.log_format is not None,
        "--reasoning-budget": address.reasoning_budget is not None,
        "--no-record": address.no_record,
        "--extra-properties": address.extra_properties,
        "--draft": config.draft is not None,
        "--adapter": config.adapter is not None,
        "--shadow": config.dense_prefill_copy,
        "--allow-nonfinite": config.allow_nonfinite,
        "--prefix-cache-dir": config.prefix_folder is not None,
    }
    for flag, is_used in used.items():
        if is_used:
            raise UsageError(f"{flag} is not available with {engine.title}", f"omit {flag}, or omit --engine")


def _require() -> None:
    try:
        import prometheus_client  # noqa: F401  # only to test that it is installed
        import starlette  # noqa: F401  # only to test that it is installed
        import uvicorn  # noqa: F401  # only to test that it is installed
    except ImportError as error:
        hint = "repair the installation: pip install --upgrade mycli-llm"
        raise UsageError(f"the server needs {error.name}, which is not installed", hint) from None


def _run(
    call: Call,
    settings: ServerSettings,
    loaded: "OpenedModel",
    max_sequences: int,
    listener: "socket",
    url: str,
    log: Callable[[str], None],
) -> None:
    from mycli.runtime.engine.pass_choices import pass_choices
    from mycli.runtime.server.application import application
    from mycli.runtime.server.connection import DrainingServer, run_until_signal
    from mycli.runtime.server.service import Service
    from mycli.runtime.server.worker import EngineWorker

    settings = replace(settings, names=(*settings.names, Path(loaded.source.name).name))
    engine = loaded.engine
    sequences = engine.shape.blocks * engine.shape.block_size // engine.context
    worker = EngineWorker(engine, settings.limits.waiting, call.out.warn, lambda: server.end())
    service = Service(settings, loaded.model, worker, int(time.time()))

    def drain() -> None:
        service.draining = True
        if service.busy:
            replies = pluralize(max(worker.underway, service.requests), "reply")
            call.out.note(f"stopping after {replies}; press Ctrl-C again to stop now")

    def ready() -> None:
        answer = {
            "url": url,
            "model": service.name,
            "context": engine.context,
            "sequences": max_sequences,
            "full_length": sequences,
            "passes": passes_json(pass_choices(loaded.model.runner)),
        }
        if call.out.json_mode:
            call.out.json_record(answer)
        else:
            cache = f"the cache holds {pluralize(sequences, 'sequence')} of {engine.context} tokens"
            if not loaded.longest_context:
                cache += f" (--ctx allows up to {loaded.model.runner.config.max_context})"
            call.out.result(f"{url} · {service.name} · up to {pluralize(max_sequences, 'reply')} concurrently; {cache}")

    server = DrainingServer(application(service, log), settings.limits, drain, lambda: service.busy, worker.cancel_all)
    record = RunningServer(os.getpid(), url, service.name, settings.names, engine.context, service.created, version())
    worker.start()
    try:
        with announced(state_dir() / "servers", record):
            run_until_signal(server, listener, ready)
    finally:
        worker.stop()
        engine.close()
        service.close()
    if worker.dead:
        raise UserError(f"the server stopped: {worker.failed}", "start it again; with -v it logs every request")
