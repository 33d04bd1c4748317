"""GET /api/ps: the models in memory."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.ollama.card import running_entry
from mycli.runtime.server.service import Service


async def ollama_ps(service: Service, request: Request) -> Response:
    """List the model that is loaded, in Ollama's form."""
    nbytes, gpu = service.worker.engine.nbytes, service.loaded.runner.device.type != "cpu"
    entry = running_entry(service.settings.card, service.name, nbytes, nbytes if gpu else 0, service.context)
    return JsonResponse({"models": [entry]})
