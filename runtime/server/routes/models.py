"""GET /v1/models and /v1/models/{name}: the served model with its context, in OpenAI's form or Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.ollama.card import utc_text
from mycli.runtime.server.service import Service


def _openai(service: Service, name: str) -> dict[str, Any]:
    config = service.loaded.runner.config
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mycli",
        "type": "base",  # Mistral's client tells its two kinds of models apart by it
        "capabilities": {"completion_chat": service.loaded.tokenizer.template is not None, "function_calling": True},
        "root": service.name,
        "context_length": service.context,
        "max_model_len": service.context,  # the same, as vLLM names it
        "max_context_length": service.context,  # and as Mistral does
        "training_context_length": config.max_context,
    }


def _anthropic(service: Service, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": utc_text(datetime.fromtimestamp(service.created, UTC)),
        "lifecycle": "active",
        "max_input_tokens": service.context,
        "max_tokens": service.context,
    }


async def list_served(service: Service, request: Request) -> Response:
    """List the model under each of its names; in Anthropic's form for requests with anthropic-version."""
    names = service.settings.names
    if "anthropic-version" in request.headers:
        data = [_anthropic(service, name) for name in names]
        return JsonResponse({"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False})
    return JsonResponse({"object": "list", "data": [_openai(service, name) for name in names]})


async def show_served(service: Service, request: Request) -> Response:
    """Show the model of a name."""
    name = request.path_params["name"]
    service.check_model(name)
    form = _anthropic if "anthropic-version" in request.headers else _openai
    return JsonResponse(form(service, name))
