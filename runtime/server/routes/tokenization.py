"""POST /tokenize, /detokenize and /apply-template: what the model is really given."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.routes.wire import chat_messages, chat_tools
from mycli.runtime.server.schemas import DetokenizeRequest, TokenizeRequest, validated
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import JsonResponse, off_loop, parse_body, read_body


async def _answer(service: Service, request: Request, work: Callable[[Any], dict[str, Any]]) -> Response:
    body = await read_body(service, request)
    return JsonResponse(await off_loop(service, lambda: work(parse_body(body))))


def _conversation(service: Service, given: TokenizeRequest) -> list[int]:
    messages = chat_messages(given.messages or ())
    arguments = given.chat_template_kwargs or {}
    return service.chat_prompt(messages, chat_tools(given.tools), arguments, given.add_generation_prompt)


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of a text or a conversation."""

    def work(value: Any) -> dict[str, Any]:
        given = validated(TokenizeRequest, value)
        service.check_model(given.model)
        if given.prompt is not None:
            ids = service.text_prompt(given.prompt, given.add_special_tokens)
        else:
            ids = _conversation(service, given)
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids}

    return await _answer(service, request, work)


async def detokenize(service: Service, request: Request) -> Response:
    """The text of ids, without special tokens."""

    def work(value: Any) -> dict[str, Any]:
        given = validated(DetokenizeRequest, value)
        service.check_model(given.model)
        service.check_ids(given.tokens, "tokens")
        return {"prompt": service.loaded.tokenizer.decode(given.tokens)}

    return await _answer(service, request, work)


async def apply_template(service: Service, request: Request) -> Response:
    """A conversation as the model's template writes it, control tokens spelled."""

    def work(value: Any) -> dict[str, Any]:
        given = validated(TokenizeRequest, value)
        service.check_model(given.model)
        ids = _conversation(service, given) if given.messages else service.text_prompt(given.prompt or "")
        return {"prompt": service.spelled(ids)}

    return await _answer(service, request, work)
