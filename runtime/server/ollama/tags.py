"""GET /api/tags: the models that are served."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.service import Service


async def ollama_tags(service: Service, request: Request) -> Response:
    """List the model under each of its names, in Ollama's form."""
    card = service.settings.card
    return JsonResponse({"models": [card.listed(name) for name in service.settings.names]})
