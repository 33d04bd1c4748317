"""POST /tokenize, /detokenize and /apply-template: the exact input of the model."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.schemas import DetokenizeRequest, TokenizeRequest
from mycli.runtime.server.routes.wire import chat_messages, chat_tools
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import read_request

_PART = 1 << 14  # ids that are written at a time


def _conversation(service: Service, body: TokenizeRequest) -> list[int]:
    messages = chat_messages(body.messages or ())
    arguments = body.chat_template_kwargs or {}
    tools, _ = chat_tools(body.tools)
    return service.chat_prompt(messages, tools, arguments, body.add_generation_prompt)


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return service.text_prompt(body.prompt, body.add_special_tokens)
    if body.content is not None:
        return service.text_prompt(body.content, body.add_special, body.parse_special)
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
