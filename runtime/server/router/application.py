"""The routes of a server for several models: those it answers itself, and those it forwards."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mycli.runtime.engine.replies.journal import ReplyJournal
from mycli.runtime.server.http.api_error import ApiError, response_not_found
from mycli.runtime.server.http.body import parse_body, read_body
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.http.listing import anthropic_model, asks_anthropic, model_list, openai_model
from mycli.runtime.server.http.routing import build_application
from mycli.runtime.server.http.settings import ServerSettings, ServerState
from mycli.runtime.server.ollama.card import NEVER, loaded_reply, running_entry, utc_text
from mycli.runtime.server.ollama.manage import MANAGING, refuse_managing
from mycli.runtime.server.ollama.version import ollama_version
from mycli.runtime.server.reply_header import find_reply
from mycli.runtime.server.router.management import ModelManager, pull_response
from mycli.runtime.server.router.metrics import router_metrics
from mycli.runtime.server.router.pool import ModelPool, Slot
from mycli.runtime.server.router.proxy import ForwardedResponse, keep_alive_of, model_of, relabelled
from mycli.runtime.server.routes.page import page, page_file
from mycli.runtime.utils import version

# Routes of a model's server; a test compares them with its table. Listed here, because importing that table would load
# torch into a process that only forwards requests.
FORWARDED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/infill",
    "/completion",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
)


class Router(ServerState):
    """The state of a server for several models."""

    def __init__(self, settings: ServerSettings, pool: ModelPool, manager: ModelManager | None = None) -> None:
        super().__init__(settings)
        self.pool, self.manager = pool, manager
        self.journal = None if settings.replies is None else ReplyJournal(settings.replies)

    @property
    def busy(self) -> bool:
        return self.requests > 0 or self.pool.active > 0


RouterEndpoint = Callable[[Router, Request], Awaitable[Response]]


def _described(slot: Slot, name: str) -> dict[str, Any]:
    model = slot.model
    return {
        **openai_model(name, model.name, model.created, model.context),
        "state": slot.shown_state,
        "pinned": model.pinned,
        "memory_bytes": model.nbytes,
        "requests": slot.active + len(slot.waiters),
        "error": model.problem or slot.failure or None,
    }


def _entry(slot: Slot, request: Request, name: str) -> dict[str, Any]:
    if asks_anthropic(request):
        return anthropic_model(name, slot.model.created, slot.model.context)
    return _described(slot, name)


async def list_models_with_state(router: Router, request: Request) -> Response:
    """List the models, each under all its names, with their state; in Anthropic's form with anthropic-version."""
    named = [(slot, name) for slot in router.pool.slots.values() for name in slot.model.names]
    return JsonResponse(model_list(request, [_entry(slot, request, name) for slot, name in named]))


async def show_model_with_state(router: Router, request: Request) -> Response:
    """Show a model with its state."""
    name = request.path_params["name"]
    return JsonResponse(_entry(router.pool.find(name), request, name))


async def _slot_in_body(router: Router, request: Request) -> tuple[Slot, bytes]:
    data = await read_body(router.settings.limits, request)
    return router.pool.find(model_of(parse_body(data))), data


async def forward(router: Router, request: Request) -> Response:
    """Forward a request to the process of its model."""
    # Parsed for the model's name only. The bytes are forwarded as they came, and the model's process validates them:
    # two validations of a field could disagree.
    data = await read_body(router.settings.limits, request)
    values = parse_body(data)
    keep = keep_alive_of(values) if request.url.path.startswith("/api/") else ()
    slot = router.pool.find(model_of(values))
    prompted = any(values.get(name) for name in ("prompt", "suffix", "messages"))
    path, unloads = request.url.path, keep == (0.0,) and not prompted
    if unloads and slot.state == "unloaded" and path in ("/api/chat", "/api/generate"):
        # Forwarded, it would load the model first.
        return JsonResponse(loaded_reply(model_of(values), path == "/api/chat", "unload"))
    return ForwardedResponse(router.pool, slot, request, data, keep)


async def load_model_on_request(router: Router, request: Request) -> Response:
    """Load a model; the response is sent once it is loaded."""
    slot, _ = await _slot_in_body(router, request)
    async with router.pool.use(slot):
        pass
    return JsonResponse(_described(slot, slot.model.name))


async def unload_model(router: Router, request: Request) -> Response:
    """Unload a model once its requests have ended."""
    slot, _ = await _slot_in_body(router, request)
    router.pool.unload(slot)
    return JsonResponse(_described(slot, slot.model.name))


async def router_health(router: Router, request: Request) -> Response:
    """Return 200 while requests are accepted, with the state of each model; 503 while shutting down."""
    pool = router.pool
    states = {name: slot.shown_state for name, slot in pool.slots.items()}
    state = "draining" if router.draining else "ok"
    body = {"status": state, "running": pool.active, "waiting": pool.waiting, "models": states}
    return JsonResponse(body, 503 if router.draining else 200)


async def router_version(router: Router, request: Request) -> Response:
    """Return the version of this program."""
    return JsonResponse({"version": version()})


async def all_metrics(router: Router, request: Request) -> Response:
    """Return the metrics of this server and of each loaded model, which is named in a label."""
    return Response(await router_metrics(router.pool), media_type=CONTENT_TYPE_LATEST)


async def router_description(router: Router, request: Request) -> Response:
    """Return the OpenAPI description of the interfaces; a model is loaded for it if none is."""
    # The description depends on the interfaces, not on the model, so any process will do; a loaded one costs nothing.
    slots = list(router.pool.slots.values())
    slot = next((slot for slot in slots if slot.state == "loaded"), slots[0])
    async with router.pool.use(slot) as process:
        answer = await process.client.get("/openapi.json")
    if answer.status_code != 200:
        raise ApiError(502, f"{slot.model.name} did not describe its interfaces", "model_process_failed")
    names = [name for slot in slots for name in slot.model.names]
    return Response(relabelled(answer.content, names), media_type="application/json")


async def model_state(router: Router, request: Request) -> Response:
    """Describe a model in llama.cpp's form, `model` of the query or the first one; it is loaded if necessary."""
    slot = router.pool.find(request.query_params.get("model"))
    async with router.pool.use(slot) as process:
        answer = await process.client.get(request.url.path, params=request.query_params)
    return Response(answer.content, answer.status_code, media_type="application/json")


async def all_tags(router: Router, request: Request) -> Response:
    """List the models, in Ollama's form."""
    models = [slot.model for slot in router.pool.slots.values()]
    return JsonResponse({"models": [model.card.listed(name) for model in models for name in model.names]})


async def all_running(router: Router, request: Request) -> Response:
    """List the loaded models, in Ollama's form."""
    entries = []
    for slot in router.pool.slots.values():
        if slot.state == "loaded":
            model = slot.model
            gpu_bytes = 0 if model.place == "cpu" else model.nbytes
            expires = router.pool.expiry(slot)
            end = NEVER if expires is None else utc_text(datetime.now(UTC) + timedelta(seconds=expires))
            entries.append(running_entry(model.card, model.name, model.nbytes, gpu_bytes, model.context, end))
    return JsonResponse({"models": entries})


async def show_card(router: Router, request: Request) -> Response:
    """Describe a model, in Ollama's form."""
    slot, _ = await _slot_in_body(router, request)
    return JsonResponse(slot.model.card.shown(slot.model.name))


async def pull_model(router: Router, request: Request) -> Response:
    """Download a model from the Hugging Face hub and serve it, if this server manages models."""
    if router.manager is None:
        return await refuse_managing(router, request)
    values = parse_body(await read_body(router.settings.limits, request))
    return pull_response(router.manager, router.pool, values, model_of(values))


async def delete_model(router: Router, request: Request) -> Response:
    """Delete a model that mycli stored, if this server manages models."""
    if router.manager is None:
        return await refuse_managing(router, request)
    name = model_of(parse_body(await read_body(router.settings.limits, request)))
    return await router.manager.removed(router.pool, name or "")


async def forward_resume(router: Router, request: Request) -> Response:
    """Forward the resumption of a reply to the process of the model that began it, which is loaded if necessary."""
    data = await read_body(router.settings.limits, request)
    # All processes record in one folder; the record has the body of the first request, which names the model.
    header = find_reply(router.journal, request.path_params["id"])
    return ForwardedResponse(router.pool, router.pool.find(model_of(header["body"])), request, data)


async def stored_response(router: Router, request: Request) -> Response:
    """Forward a request for a stored response to the loaded model that has it."""
    # Its id names no model, and what an unloaded model had stored is lost, so no model is loaded for it.
    name = request.path_params["id"]
    for process in [slot.process for slot in router.pool.slots.values() if slot.process is not None]:
        try:
            answer = await process.client.request(request.method, request.url.path, params=request.query_params)
        except (httpx2.TransportError, RuntimeError):  # it has ended meanwhile; its client is closed
            continue
        if answer.status_code != 404:
            return Response(answer.content, answer.status_code, media_type="application/json")
    raise response_not_found(name)


ROUTER_ROUTES: tuple[tuple[str, str, RouterEndpoint], ...] = (
    *(("POST", path, forward) for path in FORWARDED),
    ("POST", "/v1/replies/{id}/resume", forward_resume),
    ("GET", "/v1/responses/{id}", stored_response),
    ("DELETE", "/v1/responses/{id}", stored_response),
    ("GET", "/v1/responses/{id}/input_items", stored_response),
    ("GET", "/v1/models", list_models_with_state),
    ("POST", "/v1/models/load", load_model_on_request),
    ("POST", "/v1/models/unload", unload_model),
    ("GET", "/v1/models/{name:path}", show_model_with_state),
    ("GET", "/props", model_state),
    ("GET", "/slots", model_state),
    ("GET", "/api/tags", all_tags),
    ("GET", "/api/ps", all_running),
    ("POST", "/api/show", show_card),
    ("GET", "/api/version", ollama_version),
    ("POST", "/api/pull", pull_model),
    ("DELETE", "/api/delete", delete_model),
    *((method, path, refuse_managing) for method, path in MANAGING if path not in ("/api/pull", "/api/delete")),
    ("GET", "/health", router_health),
    ("GET", "/version", router_version),
    ("GET", "/metrics", all_metrics),
    ("GET", "/openapi.json", router_description),
    ("GET", "/", page),
    ("GET", "/web/{name:path}", page_file),
)


def router_application(router: Router, log: Callable[[str], None]) -> ASGIApp:
    """Build the application. `log` receives one line per request that no model's server has logged."""
    return build_application(router, ROUTER_ROUTES, log)
