"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's chat over the same engine."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import JsonResponse, event
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.routes.chat_spec import ChatSpec, chat_ids, prepare_chat
from mycli.runtime.server.routes.messages_request import (
    CountRequest,
    MessagesRequest,
    chat_spec,
    counted_spec,
    edit_context,
)
from mycli.runtime.server.routes.wire import TokenCounts
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import Interface, read_request
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall

STOP_REASONS = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
# Fields that the interface requires, for features that this server does not have.
_NO_END = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
_NOT_COUNTED = dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier"))
_CALLER = {"caller": {"type": "direct"}}


def _prepare(service: Service, body: MessagesRequest) -> Prepared:
    if body.context_management is None:
        return prepare_chat(service, chat_spec(body))
    spec, edits = edit_context(body, chat_spec(body), lambda spec: len(chat_ids(service, spec)))
    return replace(prepare_chat(service, spec), edits=edits)


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a conversation."""

    def tokens(spec: ChatSpec) -> int:
        return len(chat_ids(service, spec))

    def count(body: CountRequest) -> dict[str, Any]:
        if body.context_management is None:
            return {"input_tokens": tokens(counted_spec(body))}
        spec, edits = edit_context(body, counted_spec(body), tokens)
        remaining = tokens(spec)
        original = remaining + sum(edit["cleared_input_tokens"] for edit in edits)
        return {"input_tokens": remaining, "context_management": {"original_input_tokens": original}}

    _, counts = await read_request(service, request, CountRequest, count)
    return JsonResponse(counts)


class MessageRendering:
    """Writes a reply as message, or as the events of its blocks."""

    def __init__(self, service: Service, prepared: Prepared, body: MessagesRequest, ids: ReplyIds) -> None:
        self._counts = TokenCounts(prepared)
        self._clipped = prepared.clipped
        self._shown = body.shows_reasoning
        self._head = {"id": ids.name, "type": "message", "role": "assistant", "model": body.model or service.name}
        self._ids = ids
        self._block, self._kind = -1, ""  # index and type of the open block; "" for none
        self._end: dict[str, Any] = {}
        edits = prepared.edits
        self._edits = {} if edits is None else {"context_management": {"applied_edits": list(edits)}}

    def _usage(self) -> dict[str, Any]:
        cached = self._counts.cached
        counts = {"input_tokens": self._counts.prompt - cached, "output_tokens": self._counts.generated}
        counts |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        return {**counts, "output_tokens_details": {"thinking_tokens": self._counts.reasoning}, **_NOT_COUNTED}

    def begin(self) -> Iterable[bytes]:
        yield _event("message_start", message={**self._head, "content": [], **_NO_END, "usage": self._usage()})
        yield _event("ping")

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        if piece.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._shown:
                yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        for part in piece.parts:
            if isinstance(part, str):
                yield from self._open("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part})
            else:
                yield from self._add_call(part)

    def _add_call(self, call: ToolCall) -> Iterable[bytes]:
        if call.name:
            yield from self._close()
            block = {"type": "tool_use", "id": self._ids.next("toolu_"), "name": call.name, "input": {}, **_CALLER}
            yield from self._open("tool_use", block)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def keep_alive(self) -> Iterable[bytes]:
        yield _event("ping")

    def finish(self) -> Iterable[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=self._end, usage=self._usage(), **self._edits)
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield _event("error", error=error.fields())

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        (reply,) = replies
        self._count(reply)
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            thinking = reply.reasoning if self._shown else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": self._signature()})
        for part in reply.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                called = {"id": self._ids.next("toolu_"), "name": part.name, "input": _input(part)}
                content.append({"type": "tool_use", **called, **_CALLER})
        return {**self._head, "content": content, **self._end, "usage": self._usage(), **self._edits}

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        if piece.end is not None:
            reason = STOP_REASONS.get(piece.end, "end_turn")
            if piece.end == "length" and self._clipped:
                reason = "model_context_window_exceeded"
            sequence = piece.stop if reason == "stop_sequence" else None
            self._end = {**_NO_END, "stop_reason": reason, "stop_sequence": sequence}

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        if self._kind != kind:
            yield from self._close()
            self._block, self._kind = self._block + 1, kind
            yield _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> Iterable[bytes]:
        if self._kind:
            if self._kind == "thinking":
                yield self._delta({"type": "signature_delta", "signature": self._signature()})
            self._kind = ""
            yield _event("content_block_stop", index=self._block)

    def _signature(self) -> str:
        # It is not checked here, but clients send reasoning back in the next turn only with one.
        return self._ids.next("sig_")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)


def _input(call: ToolCall) -> dict[str, Any]:
    # A reply that its limit has cut may end within its arguments. Arguments that are not JSON are wrapped as Anthropic
    # suggests for them.
    try:
        values = from_json(call.arguments, allow_partial="trailing-strings")
    except ValueError:
        return {"INVALID_JSON": call.arguments}
    return values if isinstance(values, dict) else {"INVALID_JSON": call.arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


MESSAGES = Interface("messages", "msg_", MessagesRequest, _prepare, MessageRendering)


async def messages(service: Service, request: Request) -> Response:
    """Continue a conversation."""
    return await MESSAGES.reply(service, request)
