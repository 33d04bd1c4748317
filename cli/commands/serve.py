"""`mycli serve`: models over HTTP with OpenAI and Anthropic APIs, metrics and a web page."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command, subject_of
from mycli.cli.flags import options
from mycli.cli.flags.address import AddressFlags
from mycli.cli.flags.records import (
    FULL_LENGTH,
    MAX_SEQUENCES,
    LoadFlags,
    PrefixCacheFlags,
    ReasoningFlags,
    TemplateFlags,
)
from mycli.cli.flags.several import SeveralModelsFlags
from mycli.cli.load import announce_slow_passes, load_engine, warm_up_engine
from mycli.cli.reasons import passes_json
from mycli.cli.serving.local_server import listed
from mycli.cli.serving.other_engines import EngineFlags, OtherEngine, start
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.server.http.run_file import RunningServer
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.ollama.card import model_card
from mycli.runtime.utils import version
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:
    from socket import socket

    from mycli.runtime.engine.replies.opened_model import OpenedModel

EXAMPLES = (
    "mycli serve pico",
    "mycli serve pico --port 9000 --alias gpt-4o-mini --ctx 1k",
    "mycli serve pico pico-draft --idle 10m",
)
# Options for which `start` of another engine has a use, or an answer of its own.
_SHARED = {"--host", "--port", "--api-key-file", "--insecure-no-auth", "--cors", "--alias"}
_SHARED |= {"--device", "--threads", "--dtype", "--kv", "--activations", "--ctx"}


@command
def serve(
    call: Call,
    models: options.ServedModels = None,
    *,
    address: AddressFlags,
    several: SeveralModelsFlags,
    max_sequences: Annotated[
        int,
        options.option(
            "--max-sequences", "N", "Replies generated concurrently; they share the cache.", min=1, max=4096
        ),
    ] = MAX_SEQUENCES,
    reasoning: ReasoningFlags,
    templates: TemplateFlags,
    other: EngineFlags,
    prefix_cache: PrefixCacheFlags,
    loading: LoadFlags,
) -> None:
    """Serve models over HTTP, with an API and a web page.

    Provides the OpenAI and Anthropic APIs, metrics, and a page to chat. For models too large for one GPU, use --engine
    vllm or sglang: the command then starts that server on the same folder.

    Several models, --models-dir and --idle start a server that loads a model when it is requested and unloads the least
    recently used one when another needs its memory. Without MODEL, it serves the [models] of config.toml.

    Requests may set their own reasoning budget and deadline.

    On Ctrl-C or SIGTERM the server finishes its replies first; a second signal stops it immediately. Prompts and
    replies are not logged; -v prints a line for each request. mycli ps and mycli stop list and stop servers.
    """
    settings = replace(address.resolve(call), reasoning_budget=reasoning.budget, deadline=reasoning.deadline)
    config = prefix_cache.resolve(loading.resolve(min(max_sequences, FULL_LENGTH), max_sequences))
    config = replace(config, memory_limit=several.memory, template=templates.resolve())
    engine = other.resolve()
    if engine is not None:
        model = _single(models or (), engine)
        _refuse_own_options(engine, address, reasoning, templates, several, loading, prefix_cache)
        named = replace(settings, names=settings.names or (Path(model).name,))
        start(call, engine, model, config, named, address, other.ranks)
    _require()
    log = call.out.detail if address.log_format is None else call.out.log
    if not address.supervised and _is_for_several(models or (), several):
        from mycli.cli.serving.serve_several import serve_several

        sequences = ["--max-sequences", str(max_sequences)]
        records = (loading, prefix_cache, reasoning, templates)
        words = [*(word for record in records for word in options.option_words(record)), *sequences]
        words += ["--no-record"] * address.no_record
        words += ["--extra-properties"] * address.extra_properties
        serve_several(call, models or (), settings, address, several, words, log)
        return
    (model,) = models or [""]
    call.out.subject = subject_of(model)
    if address.supervised or address.end_with_stdin:
        from mycli.runtime.server.http.supervision import end_with_parent

        end_with_parent()
    listener, url = address.listen()  # before loading, which may take minutes
    try:
        loaded = load_engine(call, model, config)
        announce_slow_passes(call, loaded.model.runner)
        warm_up_engine(call, loaded)
        _run(call, settings, loaded, max_sequences, listener, url, log)
    finally:
        address.close(listener)


def _is_for_several(models: Sequence[str], several: SeveralModelsFlags) -> bool:
    manages = several.models_dir is not None or several.idle is not None or several.pinned or several.manages
    if len(models) != 1 or manages:
        return True
    from mycli.cli.serving.model_catalog import is_configured

    return is_configured(models[0])


def _single(models: Sequence[str], engine: OtherEngine) -> str:
    if len(models) != 1:
        raise UsageError(f"{engine.title} serves one model", "name one model, or omit --engine")
    return models[0]


def _refuse_own_options(engine: OtherEngine, *records: Any) -> None:
    for flag in (flag for record in records for flag in options.given_options(record)):
        if flag not in _SHARED:
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
    from mycli.runtime.server.application import application
    from mycli.runtime.server.http.connection import DrainingServer, run_until_signal
    from mycli.runtime.server.service import Service
    from mycli.runtime.server.worker import EngineWorker

    card = model_card(loaded.source.open())
    settings = replace(
        settings, names=tuple(dict.fromkeys((*settings.names, Path(loaded.source.name).name))), card=card
    )
    engine = loaded.engine
    worker = EngineWorker(engine, settings.limits.waiting, call.out.warn, lambda: server.end())
    service = Service(settings, loaded.model, worker, int(time.time()))

    def drain() -> None:
        service.draining = True
        if service.busy:
            replies = pluralize(max(worker.underway, service.requests), "reply")
            call.out.note(f"stopping after {replies}; press Ctrl-C again to stop now")

    def ready() -> None:
        _announce(call, url, service.name, loaded, max_sequences)

    server = DrainingServer(application(service, log), settings.limits, drain, lambda: service.busy, worker.cancel_all)
    record = RunningServer(os.getpid(), url, service.name, settings.names, engine.context, service.created, version())
    worker.start()
    try:
        # A server that lists several models lists this one.
        with nullcontext() if settings.supervised else listed(call, record):
            run_until_signal(server, listener, ready)
    finally:
        worker.stop()
        engine.close()
        service.close()
    if worker.dead:
        raise UserError(f"the server stopped: {worker.failed}", "start it again; with -v it logs every request")


def _announce(call: Call, url: str, name: str, loaded: "OpenedModel", max_sequences: int) -> None:
    from mycli.runtime.engine.pass_choices import pass_choices

    engine, config = loaded.engine, loaded.model.runner.config
    sequences = engine.shape.blocks * engine.shape.block_size // engine.context
    if call.out.json_mode:
        call.out.json_record(
            {
                "url": url,
                "model": name,
                "context": engine.context,
                "sequences": max_sequences,
                "full_length": sequences,
                "passes": passes_json(pass_choices(loaded.model.runner)),
            }
        )
        return
    cache = f"the cache holds {pluralize(sequences, 'sequence')} of {engine.context} tokens"
    if not loaded.longest_context:
        cache += f" (--ctx allows up to {config.max_context})"
    holds = f"up to {pluralize(max_sequences, 'reply')} concurrently; {cache}"
    if config.bidirectional:  # has no cache
        results = "vectors of texts" if loaded.model.cross_encoder is None else "scores of pairs"
        holds = f"{results} of up to {engine.context} tokens"
    call.out.result(f"{url} · {name} · {holds}")
