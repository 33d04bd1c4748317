"""Builds an application from a table of routes, with the other paths under which clients request them."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mycli.runtime.server.http.errors import exception_handlers
from mycli.runtime.server.http.guard import Guard
from mycli.runtime.server.http.settings import ServerState

_Server = TypeVar("_Server", bound=ServerState)

_ALIASES = {
    # Of Cohere and vLLM, and of llama.cpp: all answer with `results` of `index` and `relevance_score`.
    "/v1/rerank": ("/v2/rerank", "/v1/reranking", "/reranking"),
    "/health": ("/v1/health",),  # of llama.cpp
}


def build_application(
    server: _Server,
    routes: Iterable[tuple[str, str, Callable[[_Server, Request], Awaitable[Response]]]],
    log: Callable[[str], None],
) -> ASGIApp:
    """Return the application of `routes`: method, path and endpoint of each. `log` receives one line per request."""

    def bound(endpoint: Callable[[_Server, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def call(request: Request) -> Response:
            return await endpoint(server, request)

        call.__doc__ = endpoint.__doc__  # the summary in /openapi.json
        return call

    app = Starlette(
        routes=[
            Route(other, bound(endpoint), methods=[method], include_in_schema=other == path)
            for method, path, endpoint in routes
            for other in (path, *_other_paths(path))
        ],
        exception_handlers=exception_handlers(),
    )
    app.router.redirect_slashes = False  # an unknown path is 404
    return Guard(app, server, log)


def _other_paths(path: str) -> tuple[str, ...]:
    # Clients of llama.cpp, and OpenAI clients with a base URL without /v1, omit the prefix.
    short = path.startswith("/v1/") and not path.startswith("/v1/messages")
    return (*((path.removeprefix("/v1"),) if short else ()), *_ALIASES.get(path, ()))
