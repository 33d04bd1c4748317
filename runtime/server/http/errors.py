"""Turns exceptions of routes into responses, in the form of the interface that the path belongs to."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import ApiError, internal_error
from mycli.runtime.server.http.encoding import JsonResponse


def exception_handlers() -> Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        body = error.envelope(request.url.path, request.scope["state"].get("request_id", ""))
        return JsonResponse(body, error.status, headers=error.headers)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        causes = {
            404: (f"no such endpoint: {request.url.path[:100]}; /openapi.json lists them", "not_found"),
            405: (f"{request.method} is not allowed here{_instead(error)}", "method_not_allowed"),
        }
        message, code = causes.get(error.status_code, (error.detail, "invalid_request"))
        return await on_error(request, ApiError(error.status_code, message, code, headers=error.headers))

    async def on_bug(request: Request, error: Exception) -> Response:
        return await on_error(request, internal_error())  # the guard logs the cause

    return {ApiError: on_error, HTTPException: on_http_error, Exception: on_bug}


def _instead(error: HTTPException) -> str:
    allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get("allow", "")
    return f"; use {allowed}" if allowed else ""
