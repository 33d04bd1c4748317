"""Writes replies as lines of JSON, with the counts and times of Ollama."""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import JsonResponse, dumps
from mycli.runtime.server.ollama.card import loaded_reply, utc_now
from mycli.runtime.server.ollama.keep_alive import keep_alive_seconds
from mycli.runtime.server.ollama.request import OllamaRequest, shown_name
from mycli.runtime.server.routes.wire import TokenCounts, chat_logprobs
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, read_request
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, join_calls

_Body = TypeVar("_Body", bound=OllamaRequest)
_MEDIA_TYPE = "application/x-ndjson"
_DONE = {"length": "length", "deadline": "length"}


class OllamaRendering:
    """Writes replies of chat (`as_message`) or generate."""

    def __init__(self, service: Service, prepared: Prepared, body: OllamaRequest, as_message: bool) -> None:
        self._model, self._as_message = shown_name(body, service), as_message
        self._counts, self._figures = TokenCounts(prepared), prepared.figures
        self._tokenizer = service.loaded.tokenizer
        self._hides_thinking = body.think is False
        self._began = time.perf_counter_ns()
        self._first = 0  # token, in ns
        self._calls: list[ToolCall] = []
        self._end = "stop"

    def begin(self) -> Iterable[bytes]:
        return ()

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        self._calls += piece.calls
        fields = self._text(piece)
        # Arguments are an object, so a call is sent when it is complete.
        if piece.end is not None and self._calls:
            fields = (fields or self._fields("", "")) | self._shown_calls(self._calls)
        if fields:
            yield self._line(fields, piece)

    def keep_alive(self) -> Iterable[bytes]:
        yield self._line(self._fields("", ""))

    def finish(self) -> Iterable[bytes]:
        yield (dumps({**self._head(), **self._wrapped(self._fields("", "")), **self._done()}) + "\n").encode()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield (dumps({"error": error.message}) + "\n").encode()

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        (reply,) = replies
        if self._figures.ttft is not None:  # clients show tokens per second
            self._first = self._began + int(self._figures.ttft * 1e9)
        self._count(reply)
        fields = self._fields(reply.content, "" if self._hides_thinking else reply.reasoning)
        if reply.calls:
            fields |= self._shown_calls(reply.calls)
        return {**self._head(), **self._wrapped(fields), **self._done(), **self._logprobs(reply)}

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        self._first = self._first or time.perf_counter_ns()
        if piece.end is not None:
            self._end = _DONE.get(piece.end, "stop")

    def _text(self, piece: Piece) -> dict[str, Any]:
        reasoning = "" if self._hides_thinking else piece.reasoning
        return self._fields(piece.content, reasoning) if piece.content or reasoning or piece.logprobs else {}

    def _fields(self, content: str, thinking: str) -> dict[str, Any]:
        fields: dict[str, Any] = (
            {"role": "assistant", "content": content} if self._as_message else {"response": content}
        )
        return fields | ({"thinking": thinking} if thinking else {})

    def _shown_calls(self, parts: Sequence[ToolCall]) -> dict[str, Any]:
        calls = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "function": {"index": call.index, "name": call.name, "arguments": _object(call)},
            }
            for call in join_calls(parts)
        ]
        return {"tool_calls": calls}

    def _wrapped(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"message": fields} if self._as_message else fields

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": utc_now()}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(self._tokenizer, piece.logprobs)["content"]} if piece.logprobs else {}

    def _line(self, fields: dict[str, Any], piece: Piece | None = None) -> bytes:
        logprobs = {} if piece is None else self._logprobs(piece)
        return (dumps({**self._head(), **self._wrapped(fields), "done": False, **logprobs}) + "\n").encode()

    def _done(self) -> dict[str, Any]:
        now = time.perf_counter_ns()
        first = self._first or now
        return {
            "done": True,
            "done_reason": self._end,
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": self._counts.prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": self._counts.generated,
            "eval_duration": now - first,
        }


def _object(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:  # the reply was cut, or the model wrote something else
        return {"INVALID_JSON": call.arguments}
    return value if isinstance(value, dict) else {"INVALID_JSON": call.arguments}


async def answer_ollama(
    service: Service,
    request: Request,
    kind: type[_Body],
    prepare: Callable[[_Body], Prepared | None],
    *,
    as_message: bool,
) -> Response:
    """Answer a request of chat (`as_message`) or generate. `prepare` returns None without a prompt."""
    body, prepared = await read_request(service, request, kind, prepare)
    if prepared is None:
        return JsonResponse(_reply_without_text(service, body, as_message))
    rendering = OllamaRendering(service, prepared, body, as_message)
    return await answer(service, request, prepared, rendering, body.stream is not False, _MEDIA_TYPE)


def _reply_without_text(service: Service, body: OllamaRequest, as_message: bool) -> dict[str, Any]:
    unload = body.keep_alive is not None and keep_alive_seconds(body.keep_alive) == 0
    return loaded_reply(shown_name(body, service), as_message, "unload" if unload else "load")
