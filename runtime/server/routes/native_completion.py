"""POST /completion: llama.cpp's own completion of texts."""

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import invalid_value
from mycli.runtime.server.requests.schemas import MAX_IDS, MAX_PROMPTS, LongText, TokenId
from mycli.runtime.server.routes.llama_cpp import LlamaCppRendering, LlamaCppRequest, prepare_replies
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, read_request

_Part = LongText | TokenId


class NativeCompletionRequest(LlamaCppRequest):
    """The body of POST /completion: a prompt of text and token ids, or a list of prompts."""

    prompt: (
        LongText
        | Annotated[list[TokenId], Field(max_length=MAX_IDS)]
        | Annotated[list[_Part | Annotated[list[_Part], Field(max_length=MAX_IDS)]], Field(max_length=MAX_PROMPTS)]
    )


def _prompts(body: NativeCompletionRequest) -> list[Any]:
    # As llama.cpp reads them: a list with a token id in it is one prompt, any other a list of prompts.
    prompt: Any = body.prompt
    single = isinstance(prompt, str) or any(isinstance(part, int) for part in prompt)
    return [prompt] if single else prompt


def _ids(service: Service, prompt: Any) -> list[int]:
    ids: list[int] = []
    for index, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        if isinstance(part, str):
            # Control tokens count, as in llama.cpp: clients of this route write the chat's markup themselves.
            ids += service.text_prompt(part, add_special=index == 0, allow_special=True)
        elif isinstance(part, int):
            service.check_ids([part], "prompt")
            ids.append(part)
        else:
            raise invalid_value("prompt", "a list of token ids must not hold lists")
    return ids


def _prepare(service: Service, body: NativeCompletionRequest) -> Prepared:
    prompts, most = _prompts(body), service.settings.limits.choices
    if not 1 <= len(prompts) <= most:  # before they are tokenized
        problem = f"{len(prompts)} prompts in one request; at most {most}" if prompts else "is empty"
        raise invalid_value("prompt", problem)
    return prepare_replies(service, body, [_ids(service, prompt) for prompt in prompts], "prompt", fills=False)


async def native_completion(service: Service, request: Request) -> Response:
    """Continue texts, in llama.cpp's form."""
    kind = NativeCompletionRequest
    body, prepared = await read_request(service, request, kind, lambda body: _prepare(service, body))
    return await answer(service, request, prepared, LlamaCppRendering(service, prepared, body, False), body.stream)
