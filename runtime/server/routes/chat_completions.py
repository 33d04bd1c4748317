"""POST /v1/chat/completions: OpenAI's chat."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.reply_reader import Piece
from mycli.runtime.server.routes.chat_ask import ChatAsk, effort_arguments, prepare_chat
from mycli.runtime.server.routes.wire import TokenCounts, chat_messages, chat_tools, logprob_entries, new_id, now
from mycli.runtime.server.schemas import ChatRequest, NamedTool
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, event, read_request
from mycli.runtime.tokenizer.tokenizer import Tokenizer

FINISH = {"stop_string": "stop", "deadline": "length", "cancelled": "stop"}


async def chat_completions(service: Service, request: Request) -> Response:
    """Continue a conversation."""

    def prepare(given: ChatRequest) -> Prepared:
        _check(service, given)
        return prepare_chat(service, _ask(given))

    given, prepared = await read_request(service, request, ChatRequest, prepare)
    counted = given.stream_options is not None and bool(given.stream_options.include_usage)
    rendering = ChatRendering(service, prepared, counted, bool(given.logprobs))
    return await answer(service, request, prepared, rendering, bool(given.stream))


def _check(service: Service, given: ChatRequest) -> None:
    if given.n is not None and given.n > service.settings.limits.choices:
        raise ApiError(400, f"n: at most {service.settings.limits.choices}", "invalid_value", param="n")
    if given.top_logprobs is not None and not given.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs", "invalid_value", param="top_logprobs")
    if given.stream_options is not None and not given.stream:
        raise ApiError(400, "stream_options: needs stream", "invalid_value", param="stream_options")


def _ask(given: ChatRequest) -> ChatAsk:
    choice = given.tool_choice or "auto"
    limit = given.max_completion_tokens if given.max_completion_tokens is not None else given.max_tokens
    return ChatAsk(
        messages=chat_messages(given.messages),
        sampling=given,
        tools=chat_tools(given.tools),
        choice="named" if isinstance(choice, NamedTool) else choice,
        named=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel=given.parallel_tool_calls is not False,
        format=given.response_format,
        arguments=effort_arguments(given.reasoning_effort) | (given.chat_template_kwargs or {}),
        count=given.n or 1,
        limit=limit,
        top=(given.top_logprobs or 0) if given.logprobs else None,
    )


class ChatRendering:
    """Replies as chat.completion, or as chunks of one."""

    def __init__(self, service: Service, prepared: Prepared, counted: bool, logprobs: bool) -> None:
        self._tokenizer: Tokenizer = service.loaded.tokenizer
        self._counts, self._count = TokenCounts(prepared.prompt_tokens), len(prepared.wanted)
        self._counted, self._logprobs = counted, logprobs
        self._head = {"id": new_id("chatcmpl-"), "created": now(), "model": service.name}
        self._calls = [0] * self._count  # how many each reply has made

    def begin(self) -> Iterable[bytes]:
        """A role for each reply."""
        for index in range(self._count):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def add(self, piece: Piece) -> Iterable[bytes]:
        """What is new, and apart from it how the reply ended."""
        self._counts.add(piece)
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta |= {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [{"index": self._numbered(piece.index), **one} for one in _calls(piece)]
        logprobs = self._logprob_fields(piece) if piece.logprobs else None
        if delta or logprobs:
            yield self._chunk(piece.index, delta, logprobs, None)
        if piece.end is not None:
            yield self._chunk(piece.index, {}, None, FINISH.get(piece.end, piece.end))

    def finish(self) -> Iterable[bytes]:
        """Counts, where they were asked for, and the mark of the end."""
        if self._counted:
            whole = {**self._head, "object": "chat.completion.chunk", "choices": []}
            yield event({**whole, "usage": self._counts.usage()})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The error, and the mark of the end."""
        yield event({"error": error.fields()})
        yield b"data: [DONE]\n\n"

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        """chat.completion."""
        choices = []
        for reply in replies:
            self._counts.add(reply)
            message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
            if reply.calls:
                message |= {"content": reply.content or None, "tool_calls": list(_calls(reply))}
            if reply.reasoning:
                message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
            end = FINISH.get(reply.end or "stop", reply.end)
            logprobs = self._logprob_fields(reply) if self._logprobs else None
            choices.append({"index": reply.index, "message": message, "logprobs": logprobs, "finish_reason": end})
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._counts.usage()}

    def _numbered(self, index: int) -> int:
        self._calls[index] += 1
        return self._calls[index] - 1

    def _logprob_fields(self, piece: Piece) -> dict[str, Any]:
        return {"content": logprob_entries(self._tokenizer, piece.logprobs), "refusal": None}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, end: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})


def _calls(piece: Piece) -> Iterable[dict[str, Any]]:
    for call in piece.calls:
        function = {"name": call.name, "arguments": call.arguments}
        yield {"id": new_id("call_"), "type": "function", "function": function}
