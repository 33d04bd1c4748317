"""POST /tokenize, /detokenize and /apply-template: what the model is really given."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.routes.wire import chat_messages, chat_tools
from mycli.runtime.server.schemas import DetokenizeRequest, TokenizeRequest
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import JsonResponse, read_request


def _conversation(service: Service, given: TokenizeRequest) -> list[int]:
    messages = chat_messages(given.messages or ())
    arguments = given.chat_template_kwargs or {}
    return service.chat_prompt(messages, chat_tools(given.tools), arguments, given.add_generation_prompt)


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of a text or a conversation."""

    def work(given: TokenizeRequest) -> list[int]:
        if given.prompt is not None:
            return service.text_prompt(given.prompt, given.add_special_tokens)
        return _conversation(service, given)

    _, ids = await read_request(service, request, TokenizeRequest, work)
    return JsonResponse({"count": len(ids), "max_model_len": service.context, "tokens": ids})


async def detokenize(service: Service, request: Request) -> Response:
    """The text of ids, without special tokens."""

    def work(given: DetokenizeRequest) -> str:
        service.check_ids(given.tokens, "tokens")
        return service.loaded.tokenizer.decode(given.tokens)

    _, text = await read_request(service, request, DetokenizeRequest, work)
    return JsonResponse({"prompt": text})


async def apply_template(service: Service, request: Request) -> Response:
    """A conversation as the model's template writes it, control tokens spelled."""

    def work(given: TokenizeRequest) -> str:
        ids = _conversation(service, given) if given.messages else service.text_prompt(given.prompt or "")
        return service.spelled(ids)

    _, text = await read_request(service, request, TokenizeRequest, work)
    return JsonResponse({"prompt": text})
