"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's responses.

A request has the whole conversation, or the id of a recent response that it continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import JsonResponse, event
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.routes.chat_spec import ChatSpec, prepare_chat
from mycli.runtime.server.routes.response_input import earlier_items, input_items, input_messages
from mycli.runtime.server.routes.response_items import OutputItems
from mycli.runtime.server.routes.responses_request import ResponsesRequest, callable_tools, response_spec
from mycli.runtime.server.routes.wire import TokenCounts, chat_logprobs, now
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import Interface, read_request


def _spec(service: Service, body: ResponsesRequest) -> ChatSpec:
    messages, omitted = input_messages(body, service.items, earlier_items(body, service.conversations))
    return response_spec(body, messages, omitted, callable_tools(body))


def _prepare(service: Service, body: ResponsesRequest) -> Prepared:
    return prepare_chat(service, _spec(service, body))


def _whole_input(service: Service, body: ResponsesRequest, ids: ReplyIds) -> Sequence[Mapping[str, Any]]:
    # Ids of their own count: those of the output stay the same whatever the input is.
    named = input_items(body, ReplyIds(f"{ids.name} input", ids.created))
    return [*earlier_items(body, service.conversations), *named]


async def input_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of an input."""

    def count(body: ResponsesRequest) -> int:
        spec = _spec(service, body)
        return len(service.chat_prompt(spec.messages, spec.offered_tools, spec.arguments, place="input"))

    _, tokens = await read_request(service, request, ResponsesRequest, count)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})


class ResponseRendering:
    """Writes a reply as response, or as the events of its items."""

    def __init__(self, service: Service, prepared: Prepared, body: ResponsesRequest, ids: ReplyIds) -> None:
        self._counts = TokenCounts(prepared)
        tokenizer = service.loaded.tokenizer

        def logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
            content: list[dict[str, Any]] = chat_logprobs(tokenizer, tokens)["content"]
            return content

        self._items = OutputItems(callable_tools(body).identities, logprobs, ids)
        self._stores = None if body.store is False else (service.items, service.conversations)
        self._input = [] if self._stores is None else _whole_input(service, body, ids)
        self._event_number = 0
        self._cut, self._shows_reasoning = False, body.shows_reasoning
        text_format = body.text.format if body.text is not None else None
        text_fields = {"type": "text"}
        if text_format is not None:
            text_fields = text_format.model_dump(by_alias=True, exclude_none=True)
        tools = [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()]
        choice = body.tool_choice
        self._head: dict[str, Any] = {
            "id": ids.name,
            "object": "response",
            "created_at": ids.created,
            "background": False,
            "conversation": None,
            "error": None,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": None if body.max_output_tokens == -1 else body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": body.model or service.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": self._stores is not None,
            "temperature": body.temperature,
            "text": {"format": text_fields, "verbosity": "medium"},
            "tool_choice": choice
            if isinstance(choice, str)
            else ("auto" if choice is None else choice.model_dump(exclude_none=True)),
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": None,
        }

    def _response(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = {
            "input_tokens": self._counts.prompt,
            "input_tokens_details": {"cached_tokens": self._counts.cached, "cache_write_tokens": 0},
            "output_tokens": self._counts.generated,
            "output_tokens_details": {"reasoning_tokens": self._counts.reasoning},
            "total_tokens": self._counts.prompt + self._counts.generated,
        }
        ended = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "output": self._items.all(),
            "completed_at": now() if ended else None,
            "incomplete_details": cut,
            "usage": counts if ended else None,
        }

    def _numbered(self, events: Iterable[tuple[str, dict[str, Any]]]) -> Iterable[bytes]:
        for kind, fields in events:
            yield event({"type": kind, "sequence_number": self._event_number, **fields}, kind)
            self._event_number += 1

    def begin(self) -> Iterable[bytes]:
        kinds = ("response.created", "response.in_progress")
        yield from self._numbered((kind, {"response": self._response("in_progress")}) for kind in kinds)

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        yield from self._numbered(self._items.add(self._shown(piece)))

    def keep_alive(self) -> Iterable[bytes]:
        yield from self._numbered([("response.in_progress", {"response": self._response("in_progress")})])

    def finish(self) -> Iterable[bytes]:
        status = self._end()
        yield from self._numbered(self._items.close(status))
        response = self._response(status)
        self._store(response)
        yield from self._numbered([(f"response.{status}", {"response": response})])

    def failed(self, error: ApiError) -> Iterable[bytes]:
        response = {**self._response("failed"), "error": {"code": error.code, "message": error.message}}
        yield from self._numbered([("response.failed", {"response": response})])

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        (reply,) = replies
        self._count(reply)
        list(self._items.add(self._shown(reply)))
        list(self._items.close(self._end()))
        response = self._response(self._end())
        self._store(response)
        return response

    def _shown(self, piece: Piece) -> Piece:
        return piece if self._shows_reasoning else replace(piece, reasoning="")

    def _end(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _store(self, response: Mapping[str, Any]) -> None:
        if self._stores is not None:
            items, conversations = self._stores
            items.keep(response["output"])
            conversations.keep([{"id": response["id"], "input": self._input, "response": response}])

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        self._cut = self._cut or piece.end == "length"


RESPONSES = Interface("responses", "resp_", ResponsesRequest, _prepare, ResponseRendering)


async def responses(service: Service, request: Request) -> Response:
    """Reply to a conversation."""
    return await RESPONSES.reply(service, request)
