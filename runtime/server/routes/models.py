"""GET /v1/models and /v1/models/{name}: the served model with its context."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import JsonResponse


def _fields(service: Service, name: str) -> dict[str, Any]:
    config = service.loaded.runner.config
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mycli",
        "root": service.name,
        "context_length": service.context,
        "max_model_len": service.context,  # the same, as vLLM names it
        "training_context_length": config.max_context,
    }


async def list_served(service: Service, request: Request) -> Response:
    """List the model under each of its names."""
    return JsonResponse({"object": "list", "data": [_fields(service, name) for name in service.settings.names]})


async def show_served(service: Service, request: Request) -> Response:
    """Show the model of a name."""
    name = request.path_params["name"]
    service.check_model(name)
    return JsonResponse(_fields(service, name))
