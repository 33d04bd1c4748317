"""GET /openapi.json: an OpenAPI 3.1 description, generated from the request schemas and the routes.

Responses are described by media type only: OpenAI and Anthropic publish their schemas.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.ollama.embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from mycli.runtime.server.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from mycli.runtime.server.ollama.show import OllamaShowRequest
from mycli.runtime.server.routes.chat_completions import ChatRequest
from mycli.runtime.server.routes.completions import CompletionRequest
from mycli.runtime.server.routes.embeddings import EmbeddingsRequest
from mycli.runtime.server.routes.infill import InfillRequest
from mycli.runtime.server.routes.messages_request import CountRequest, MessagesRequest
from mycli.runtime.server.routes.native_completion import NativeCompletionRequest
from mycli.runtime.server.routes.replies import ResumeRequest
from mycli.runtime.server.routes.rerank import RerankRequest
from mycli.runtime.server.routes.responses_request import ResponsesRequest
from mycli.runtime.server.routes.score import ScoreRequest
from mycli.runtime.server.routes.tokenization import DetokenizeRequest, TokenizeRequest
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import off_loop
from mycli.runtime.utils import version

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/v1/replies/{id}/resume": ResumeRequest,
    "/infill": InfillRequest,
    "/completion": NativeCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": TokenizeRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
}
_MEDIA = {"/": "text/html", "/web/{name}": "*/*", "/metrics": "text/plain"}
_STREAMED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/replies/{id}/resume"),
    *("/infill", "/completion"),
)
_TEXT, _ANY = {"type": "string"}, {"type": "object"}
_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE, "details": _ANY},
        }
    },
}

_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(path: str, summary: str) -> dict[str, Any]:
    body = BODIES.get(path)
    media = _MEDIA.get(path, "application/json")
    content: dict[str, Any] = {media: {"schema": _ANY if media == "application/json" else _TEXT}}
    if path in ("/api/chat", "/api/generate"):
        content["application/x-ndjson"] = {}
    if path in _STREAMED:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe server-sent events
    error = _reference("OllamaError" if path.startswith("/api/") else "Error")
    failed = {"description": "The error.", "content": {"application/json": {"schema": error}}}
    success = {"description": "The response.", "content": content}
    responses: dict[str, Any] = {"200": success, "4XX": failed, "5XX": failed}
    if path == "/health":
        responses["503"] = {"description": "The server is shutting down, or the engine has failed.", "content": content}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        schema = {"application/json": {"schema": _reference(body.__name__)}}
        operation["requestBody"] = {"required": True, "content": schema}
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    return operation


def openapi_document(routes: Iterable[Route], names: Sequence[str]) -> dict[str, Any]:
    """Describe `routes`, with the first docstring line of each as summary; `names`: accepted as `model`."""
    kinds = list(dict.fromkeys(BODIES.values()))
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    for schema in schemas["$defs"].values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*names, None]}
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        summary = (route.endpoint.__doc__ or "").strip().partition("\n")[0]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, summary)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"mycli: {names[0]}", "version": version()},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR, "OllamaError": _OLLAMA_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


async def description(service: Service, request: Request) -> Response:
    """Return this description."""
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema]
    return JsonResponse(await off_loop(service, lambda: openapi_document(routes, service.settings.names)))
