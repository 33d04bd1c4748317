"""POST /tokenize, /detokenize and /apply-template: the exact input of the model."""

from typing import Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.schemas import (
    MAX_IDS,
    MAX_TOOLS,
    ChatMessage,
    ForModel,
    LongText,
    TokenId,
    ToolSpec,
)
from mycli.runtime.server.routes.wire import chat_messages, chat_tools
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import read_request

_PART = 1 << 14  # ids that are written at a time


class TokenizeRequest(ForModel):
    """The body of POST /tokenize: a text, or a conversation to render with the chat template."""

    prompt: LongText | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    tools: list[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
    # llama.cpp's name of the text, with defaults of its own
    content: LongText | None = None
    add_special: bool = False
    parse_special: bool = True

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> "TokenizeRequest":
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(ForModel):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=MAX_IDS)


def _conversation(service: Service, body: TokenizeRequest) -> list[int]:
    messages = chat_messages(body.messages or ())
    arguments = body.chat_template_kwargs or {}
    tools, _ = chat_tools(body.tools)
    return service.chat_prompt(messages, tools, arguments, body.add_generation_prompt)


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return service.text_prompt(body.prompt, add_special=body.add_special_tokens)
    if body.content is not None:
        return service.text_prompt(body.content, add_special=body.add_special, allow_special=body.parse_special)
    return _conversation(service, body)


def _ids_response(ids: list[int], context: int) -> Response:
    # In parts: one call of the JSON library would hold the GIL for all of millions of ids.
    parts = (ids[start : start + _PART] for start in range(0, len(ids), _PART))
    tokens = ",".join(",".join(map(str, part)) for part in parts)
    body = f'{{"count":{len(ids)},"max_model_len":{context},"tokens":[{tokens}]}}'
    return Response(body, media_type="application/json")


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text or a conversation."""

    def work(body: TokenizeRequest) -> Response:
        return _ids_response(_ids(service, body), service.context)

    _, response = await read_request(service, request, TokenizeRequest, work)
    return response


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, without control tokens."""

    def work(body: DetokenizeRequest) -> Response:
        service.check_ids(body.tokens, "tokens")
        text = service.loaded.tokenizer.decode(body.tokens)
        return JsonResponse({"prompt": text, "content": text})  # in vLLM's and llama.cpp's words

    _, response = await read_request(service, request, DetokenizeRequest, work)
    return response


async def apply_template(service: Service, request: Request) -> Response:
    """Render a conversation with the chat template, control tokens spelled out."""

    def work(body: TokenizeRequest) -> Response:
        return JsonResponse({"prompt": service.loaded.tokenizer.spelled(_ids(service, body))})

    _, response = await read_request(service, request, TokenizeRequest, work)
    return response
