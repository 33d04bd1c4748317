"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's chat over the same engine."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.reply_reader import Piece
from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.routes.chat_spec import ChatSpec, prepare_chat
from mycli.runtime.server.routes.wire import TokenCounts, new_id, text_of
from mycli.runtime.server.schemas import (
    MAX_CONTENT_PARTS,
    Content,
    ContentPart,
    ForModel,
    LongText,
    Name,
    Sampling,
    StopString,
    Strict,
    ToolName,
)
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import JsonResponse, answer, event, read_request
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.stream import MAX_STOPS

STOP_REASONS = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
# Fields that the interface requires, for features that this server does not have.
_NO_END = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
_NOT_COUNTED = dict.fromkeys(
    ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
)
_CALLER = {"caller": {"type": "direct"}}


class MessageBlock(ContentPart):
    """A block of a message: text, tool call, tool result or thinking."""

    id: Annotated[str, Field(max_length=256)] = ""
    name: Annotated[str, Field(max_length=256)] = ""
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] = ""
    content: Content = None
    thinking: LongText | None = None


class InputMessage(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: LongText | Annotated[list[MessageBlock], Field(max_length=MAX_CONTENT_PARTS)]


class InputTool(Strict):
    """A tool with the JSON schema of its input."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: LongText | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """Which tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Whether the model reasons first, if its template has a switch."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(ForModel):
    """The body of POST /v1/messages/count_tokens."""

    messages: list[InputMessage] = Field(min_length=1, max_length=4096)
    system: Content = None
    tools: list[InputTool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=1 << 31)
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 31)


def _messages(body: CountRequest) -> list[Message]:
    # Templates expect a tool result as a message of its own.
    messages = [] if body.system is None else [Message("system", text_of(body.system, "system"))]
    names: dict[str, str] = {}  # of called tools, by call id
    for index, message in enumerate(body.messages):
        place = f"messages.{index}.content"
        blocks: Sequence[MessageBlock] = (
            [MessageBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        )
        texts: list[ContentPart] = []
        thinking, calls = "", []
        for number, block in enumerate(blocks):
            if block.type == "tool_use":
                names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"type": "function", "id": block.id, "function": function})
            elif block.type == "tool_result":
                content = text_of(block.content, f"{place}.{number}.content")
                name = names.get(block.tool_use_id, "")
                messages.append(Message("tool", content, name=name, tool_call_id=block.tool_use_id))
            elif block.type == "thinking":
                thinking += block.thinking or ""
            elif block.type != "redacted_thinking":
                texts.append(block)
        if texts or calls or thinking or not blocks:
            messages.append(Message(message.role, text_of(texts, place), tuple(calls), thinking))
    return messages


def _tools(body: CountRequest) -> list[Tool]:
    tools: list[Tool] = []
    for tool in body.tools or ():
        described = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **described, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    return tools


def _arguments(body: CountRequest) -> dict[str, Any]:
    return {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}


def _spec(body: MessagesRequest) -> ChatSpec:
    choice = body.tool_choice or ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name: is required", "missing_required_parameter", param="tool_choice.name")
    settings = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    sampling = Sampling.model_validate({**settings, "stop": body.stop_sequences or None})
    return ChatSpec(
        messages=_messages(body),
        sampling=sampling,
        tools=_tools(body),
        choice="required" if choice.type == "any" else choice.type,
        named=choice.name if choice.type == "tool" else None,
        parallel=not choice.disable_parallel_tool_use,
        arguments=_arguments(body),
        limit=body.max_tokens,
    )


async def messages(service: Service, request: Request) -> Response:
    """Continue a conversation."""

    def prepare(body: MessagesRequest) -> Prepared:
        return prepare_chat(service, _spec(body))

    body, prepared = await read_request(service, request, MessagesRequest, prepare)
    return await answer(service, request, prepared, MessageRendering(service, prepared), bool(body.stream))


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a conversation."""

    def count(body: CountRequest) -> int:
        none = body.tool_choice is not None and body.tool_choice.type == "none"
        return len(service.chat_prompt(_messages(body), [] if none else _tools(body), _arguments(body)))

    _, tokens = await read_request(service, request, CountRequest, count)
    return JsonResponse({"input_tokens": tokens})


class MessageRendering:
    """Writes a reply as message, or as the events of its blocks."""

    def __init__(self, service: Service, prepared: Prepared) -> None:
        self._counts = TokenCounts(prepared.prompt_tokens)
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": service.name}
        self._block, self._kind = -1, ""  # index and type of the open block; "" for none
        self._end: dict[str, Any] = {}

    def _usage(self) -> dict[str, Any]:
        cached = self._counts.cached
        counts = {"input_tokens": self._counts.prompt - cached, "output_tokens": self._counts.generated}
        return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0, **_NOT_COUNTED}

    def begin(self) -> Iterable[bytes]:
        yield _event("message_start", message={**self._head, "content": [], **_NO_END, "usage": self._usage()})

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        if piece.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.content:
            yield from self._open("text", {"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": piece.content})
        for call in piece.calls:
            yield from self._close()
            block = {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": {}, **_CALLER}
            yield from self._open("tool_use", block)
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield from self._close()

    def finish(self) -> Iterable[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=self._end, usage=self._usage())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield _event("error", error=error.fields())

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        (reply,) = replies
        self._count(reply)
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            content.append({"type": "text", "text": reply.content, "citations": None})
        for call in reply.calls:
            values = json.loads(call.arguments)
            called = {"id": new_id("toolu_"), "name": call.name, "input": values}
            content.append({"type": "tool_use", **called, **_CALLER})
        return {**self._head, "content": content, **self._end, "usage": self._usage()}

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        if piece.end is not None:
            reason = STOP_REASONS.get(piece.end, "end_turn")
            self._end = {**_NO_END, "stop_reason": reason, "stop_sequence": piece.stop}

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        if self._kind != kind:
            yield from self._close()
            self._block, self._kind = self._block + 1, kind
            yield _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> Iterable[bytes]:
        if self._kind:
            self._kind = ""
            yield _event("content_block_stop", index=self._block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
