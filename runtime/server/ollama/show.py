"""POST /api/show: the description of a model."""

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.schemas import ForModel, Name
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import read_request


class OllamaShowRequest(ForModel):
    """The body of POST /api/show."""

    name: Name | None = None  # the older field for the model
    verbose: bool | None = Field(None)


async def ollama_show(service: Service, request: Request) -> Response:
    """Describe a model, in Ollama's form."""
    await read_request(service, request, OllamaShowRequest, lambda body: service.check_model(body.name))
    return JsonResponse(service.settings.card.shown(service.name, service.loaded.tokenizer.fim_tokens is not None))
