"""POST /api/chat: Ollama's chat."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.ollama.rendering import answer_ollama
from mycli.runtime.server.ollama.request import (
    OllamaChatRequest,
    OllamaMessage,
    ollama_spec,
    read_options,
    refuse_images,
)
from mycli.runtime.server.routes.chat_spec import ChatSpec, prepare_chat
from mycli.runtime.server.routes.wire import call_fields, chat_tools
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.chat_template import Message


async def ollama_chat(service: Service, request: Request) -> Response:
    """Continue a conversation, in Ollama's form."""

    def prepare(body: OllamaChatRequest) -> Prepared | None:
        return prepare_chat(service, _spec(service, body)) if body.messages else None

    return await answer_ollama(service, request, OllamaChatRequest, prepare, as_message=True)


def _spec(service: Service, body: OllamaChatRequest) -> ChatSpec:
    options = read_options(body, service.context)
    tools, omitted_tools = chat_tools(body.tools)
    messages = [_message(item, f"messages.{index}") for index, item in enumerate(body.messages or ())]
    return replace(ollama_spec(body, messages, options), tools=tools, omitted_tools=omitted_tools)


def _message(item: OllamaMessage, place: str) -> Message:
    refuse_images(item.images, f"{place}.images")
    calls = [call_fields(call.function.name, call.function.arguments, call.id or "") for call in item.tool_calls or ()]
    return Message(
        item.role, item.content or "", tuple(calls), item.thinking or "", item.tool_name or "", item.tool_call_id or ""
    )
