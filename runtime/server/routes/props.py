"""GET /props: llama.cpp's description of the served model."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.chat_prompt import template_source
from mycli.runtime.server.service import Service
from mycli.runtime.utils import version


async def props(service: Service, request: Request) -> Response:
    """Return the context, the chat template and the start and end tokens of the model."""
    tokenizer = service.loaded.tokenizer

    def token(ids: tuple[int | None, ...]) -> str:
        return next((tokenizer.vocabulary[index] or "" for index in ids if index is not None), "")

    return JsonResponse(
        {
            "default_generation_settings": {"n_ctx": service.context},
            "total_slots": service.worker.engine.scheduler.limits.running,
            "model_alias": service.name,
            "model_path": service.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template_source(tokenizer),
            "bos_token": token((tokenizer.bos,)),
            "eos_token": token(tokenizer.eos),
            "build_info": f"mycli {version()}",
            "is_sleeping": False,
        }
    )
