"""POST /completion: llama.cpp's own completion of a text."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.requests.schemas import MAX_IDS, LongText, TokenId
from mycli.runtime.server.routes.llama_cpp import LlamaCppRendering, LlamaCppRequest, prepare_reply
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, read_request


class NativeCompletionRequest(LlamaCppRequest):
    """The body of POST /completion."""

    prompt: LongText | Annotated[list[TokenId], Field(max_length=MAX_IDS)]


def _prepare(service: Service, body: NativeCompletionRequest) -> Prepared:
    if isinstance(body.prompt, str):
        # Control tokens count, as in llama.cpp: clients of this route write the chat's markup themselves.
        prompt = service.text_prompt(body.prompt, allow_special=True)
    else:
        service.check_ids(body.prompt, "prompt")
        prompt = list(body.prompt)
    return prepare_reply(service, body, prompt, "prompt", fills=False)


async def native_completion(service: Service, request: Request) -> Response:
    """Continue a text, in llama.cpp's form."""
    kind = NativeCompletionRequest
    body, prepared = await read_request(service, request, kind, lambda body: _prepare(service, body))
    return await answer(service, request, prepared, LlamaCppRendering(service, prepared, body, False), body.stream)
