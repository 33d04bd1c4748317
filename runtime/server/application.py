"""The table of routes and the application around them. A new route is one file and one line here."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mycli.runtime.server.http.routing import build_application
from mycli.runtime.server.ollama.chat import ollama_chat
from mycli.runtime.server.ollama.embed import ollama_embed, ollama_embeddings
from mycli.runtime.server.ollama.generate import ollama_generate
from mycli.runtime.server.ollama.manage import MANAGING, refuse_managing
from mycli.runtime.server.ollama.ps import ollama_ps
from mycli.runtime.server.ollama.show import ollama_show
from mycli.runtime.server.ollama.tags import ollama_tags
from mycli.runtime.server.ollama.version import ollama_version
from mycli.runtime.server.routes.chat_completions import chat_completions
from mycli.runtime.server.routes.completions import completions
from mycli.runtime.server.routes.description import description
from mycli.runtime.server.routes.embeddings import embeddings
from mycli.runtime.server.routes.infill import infill
from mycli.runtime.server.routes.messages import count_tokens, messages
from mycli.runtime.server.routes.models import list_served, show_served
from mycli.runtime.server.routes.native_completion import native_completion
from mycli.runtime.server.routes.page import page, page_file
from mycli.runtime.server.routes.props import props
from mycli.runtime.server.routes.replies import resume
from mycli.runtime.server.routes.rerank import rerank
from mycli.runtime.server.routes.responses import input_tokens, responses
from mycli.runtime.server.routes.score import score_pairs
from mycli.runtime.server.routes.slots import slots
from mycli.runtime.server.routes.status import health, metrics, server_version
from mycli.runtime.server.routes.stored_responses import delete_response, list_input_items, show_response
from mycli.runtime.server.routes.tokenization import apply_template, detokenize, tokenize
from mycli.runtime.server.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]
ROUTES: Sequence[tuple[str, str, Endpoint]] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/responses/input_tokens", input_tokens),
    ("GET", "/v1/responses/{id}", show_response),
    ("DELETE", "/v1/responses/{id}", delete_response),
    ("GET", "/v1/responses/{id}/input_items", list_input_items),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/replies/{id}/resume", resume),
    ("GET", "/v1/models", list_served),
    ("GET", "/v1/models/{name:path}", show_served),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v1/score", score_pairs),
    ("POST", "/infill", infill),
    ("POST", "/completion", native_completion),
    ("GET", "/props", props),
    ("GET", "/slots", slots),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/apply-template", apply_template),
    ("GET", "/health", health),
    ("GET", "/version", server_version),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", description),
    ("POST", "/api/chat", ollama_chat),
    ("POST", "/api/generate", ollama_generate),
    ("POST", "/api/embed", ollama_embed),
    ("POST", "/api/embeddings", ollama_embeddings),
    ("GET", "/api/tags", ollama_tags),
    ("GET", "/api/ps", ollama_ps),
    ("POST", "/api/show", ollama_show),
    ("GET", "/api/version", ollama_version),
    *((method, path, refuse_managing) for method, path in MANAGING),
    ("GET", "/", page),
    ("GET", "/web/{name:path}", page_file),
)


def application(service: Service, log: Callable[[str], None]) -> ASGIApp:
    """Build the application. `log` receives one line per request, without prompt or reply."""
    return build_application(service, ROUTES, log)
