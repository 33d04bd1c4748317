"""POST /v1/chat/completions: OpenAI's chat."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.reply_reader import Piece
from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.routes.chat_spec import ChatSpec, effort_arguments, prepare_chat
from mycli.runtime.server.routes.wire import OpenAIRendering, chat_logprobs, chat_messages, chat_tools, new_id, now
from mycli.runtime.server.schemas import ChatRequest, NamedTool
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, event, read_request

FINISH = {"stop_string": "stop", "deadline": "length", "cancelled": "stop"}


async def chat_completions(service: Service, request: Request) -> Response:
    """Continue a conversation."""

    def prepare(body: ChatRequest) -> Prepared:
        _check(service, body)
        return prepare_chat(service, _spec(body))

    body, prepared = await read_request(service, request, ChatRequest, prepare)
    rendering = ChatRendering(service, prepared, body)
    return await answer(service, request, prepared, rendering, bool(body.stream))


def _check(service: Service, body: ChatRequest) -> None:
    if body.n is not None and body.n > service.settings.limits.choices:
        raise ApiError(400, f"n: at most {service.settings.limits.choices}", "invalid_value", param="n")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs", "invalid_value", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: needs stream", "invalid_value", param="stream_options")


def _spec(body: ChatRequest) -> ChatSpec:
    choice = body.tool_choice or "auto"
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return ChatSpec(
        messages=chat_messages(body.messages),
        sampling=body,
        tools=chat_tools(body.tools),
        choice="named" if isinstance(choice, NamedTool) else choice,
        named=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel=body.parallel_tool_calls is not False,
        format=body.response_format,
        arguments=effort_arguments(body.reasoning_effort) | (body.chat_template_kwargs or {}),
        count=body.n or 1,
        limit=limit,
        top=(body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatRendering(OpenAIRendering):
    """Writes replies as chat.completion, whole or in chunks."""

    def __init__(self, service: Service, prepared: Prepared, body: ChatRequest) -> None:
        head = {"id": new_id("chatcmpl-"), "created": now(), "model": service.name, "object": "chat.completion.chunk"}
        super().__init__(prepared.prompt_tokens, head, body.stream_options)
        self._tokenizer, self._logprobs = service.loaded.tokenizer, bool(body.logprobs)
        self._calls = [0] * prepared.replies  # tool calls of each reply so far

    def begin(self) -> Iterable[bytes]:
        for index in range(len(self._calls)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._counts.add(piece)
        delta: dict[str, Any] = {}
        if piece.reasoning:
            # vLLM renamed the field in 0.32: clients read one or the other.
            delta |= {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [{"index": self._next_call(piece.index), **call} for call in _calls(piece)]
        logprobs = chat_logprobs(self._tokenizer, piece.logprobs) if piece.logprobs else None
        if delta or logprobs:
            yield self._chunk(piece.index, delta, logprobs, None)
        if piece.end is not None:
            yield self._chunk(piece.index, {}, None, FINISH.get(piece.end, piece.end))

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        choices = []
        for reply in replies:
            self._counts.add(reply)
            message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
            if reply.calls:
                message |= {"content": reply.content or None, "tool_calls": list(_calls(reply))}
            if reply.reasoning:
                message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
            end = FINISH.get(reply.end or "stop", reply.end)
            logprobs = chat_logprobs(self._tokenizer, reply.logprobs) if self._logprobs else None
            choices.append({"index": reply.index, "message": message, "logprobs": logprobs, "finish_reason": end})
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._counts.usage()}

    def _next_call(self, index: int) -> int:
        self._calls[index] += 1
        return self._calls[index] - 1

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, end: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}
        return event({**self._head, "choices": [choice]})


def _calls(piece: Piece) -> Iterable[dict[str, Any]]:
    for call in piece.calls:
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": new_id("call_"), "type": "function", "function": function}
