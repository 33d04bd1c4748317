"""GET /v1/models and /v1/models/{name}: the served model with its context, in OpenAI's form or Anthropic's."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.http.listing import anthropic_model, asks_anthropic, model_list, openai_model
from mycli.runtime.server.service import Service


def _described(service: Service, request: Request, name: str) -> dict[str, Any]:
    if asks_anthropic(request):
        return anthropic_model(name, service.created, service.context)
    config, template = service.loaded.runner.config, service.loaded.tokenizer.template
    generates = not config.bidirectional
    return {
        **openai_model(name, service.name, service.created, service.context),
        "capabilities": {"completion_chat": generates and template is not None, "function_calling": generates},
        "training_context_length": config.max_context,
    }


async def list_served(service: Service, request: Request) -> Response:
    """List the model under each of its names; in Anthropic's form for requests with anthropic-version."""
    return JsonResponse(model_list(request, [_described(service, request, name) for name in service.settings.names]))


async def show_served(service: Service, request: Request) -> Response:
    """Show the model of a name."""
    name = request.path_params["name"]
    service.check_model(name)
    return JsonResponse(_described(service, request, name))
