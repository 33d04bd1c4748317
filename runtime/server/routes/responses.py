"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's responses over the same engine.

Nothing is stored: a conversation is sent whole.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.reply_reader import Piece
from mycli.runtime.server.routes.chat_ask import ChatAsk, effort_arguments, prepare_chat
from mycli.runtime.server.routes.response_items import OutputItems
from mycli.runtime.server.routes.wire import TokenCounts, call_fields, new_id, now, text_of
from mycli.runtime.server.schemas import (
    Content,
    Effort,
    ForModel,
    LongText,
    Name,
    No,
    ResponseFormat,
    Sampling,
    SchemaFormat,
    Strict,
    ToolName,
)
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import JsonResponse, answer, event, read_request
from mycli.runtime.tokenizer.chat_template import Message, Tool


class InputItem(Strict):
    """A message, a call, the answer to one, or what was thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    call_id: Annotated[str, Field(max_length=256)] = ""
    name: Annotated[str, Field(max_length=256)] = ""
    arguments: LongText = ""
    output: Content = None


class FunctionTool(Strict):
    """A function that a model may call."""

    type: Literal["function"]
    name: ToolName
    description: LongText | None = None
    parameters: dict[str, Any] | None = None


class NamedFunction(Strict):
    """The choice of one function."""

    type: Literal["function"]
    name: Name


class TextFormat(SchemaFormat):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Strict):
    """How the text is to be."""

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """How hard the model is to think."""

    effort: Effort | None = None


class ResponsesRequest(ForModel):
    """The body of POST /v1/responses."""

    input: LongText | list[InputItem]
    instructions: LongText | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    previous_response_id: None = None
    conversation: None = None
    background: No | None = None


def _messages(given: ResponsesRequest) -> list[Message]:
    found = [] if given.instructions is None else [Message("system", given.instructions)]
    if isinstance(given.input, str):
        return [*found, Message("user", given.input)]
    names: dict[str, str] = {}
    for index, item in enumerate(given.input):
        place = f"input.{index}"
        if item.type == "function_call":
            call = call_fields(item.name, item.arguments, item.call_id, f"{place}.arguments")
            names[item.call_id] = item.name
            if found and found[-1].role == "assistant":  # calls of one turn stand in one message
                last = found.pop()
                found.append(Message("assistant", last.content, (*last.tool_calls, call), last.reasoning))
            else:
                found.append(Message("assistant", "", (call,)))
        elif item.type == "function_call_output":
            content = text_of(item.output, f"{place}.output")
            found.append(Message("tool", content, name=names.get(item.call_id, ""), tool_call_id=item.call_id))
        elif item.type == "message":
            if item.role is None:
                message = f"{place}.role: is required"
                raise ApiError(400, message, "missing_required_parameter", param=f"{place}.role")
            found.append(Message(item.role, text_of(item.content, f"{place}.content")))
    return found


def _ask(given: ResponsesRequest) -> ChatAsk:
    form = given.text.format if given.text is not None else None
    choice = given.tool_choice or "auto"
    if form is not None and form.type == "json_schema" and form.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", "missing_required_parameter", param="text.format.schema")
    return ChatAsk(
        messages=_messages(given),
        sampling=Sampling.model_validate({"temperature": given.temperature, "top_p": given.top_p}),
        tools=_tools(given),
        choice="named" if isinstance(choice, NamedFunction) else choice,
        named=choice.name if isinstance(choice, NamedFunction) else None,
        parallel=given.parallel_tool_calls is not False,
        format=None if form is None else ResponseFormat(type=form.type, json_schema=form, schema=None),
        arguments=effort_arguments(None if given.reasoning is None else given.reasoning.effort),
        limit=given.max_output_tokens,
    )


def _tools(given: ResponsesRequest) -> list[Tool]:
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in given.tools or ()
    ]


async def responses(service: Service, request: Request) -> Response:
    """Answer."""
    given, prepared = await read_request(
        service, request, ResponsesRequest, lambda one: prepare_chat(service, _ask(one))
    )
    rendering = ResponseRendering(service, given, prepared)
    return await answer(service, request, prepared, rendering, bool(given.stream))


async def input_tokens(service: Service, request: Request) -> Response:
    """How many tokens an input is."""

    def count(given: ResponsesRequest) -> int:
        ask = _ask(given)
        return len(service.chat_prompt(ask.messages, ask.offered, ask.arguments))

    _, tokens = await read_request(service, request, ResponsesRequest, count)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})


class ResponseRendering:
    """A reply as response, or as the events of its items."""

    def __init__(self, service: Service, given: ResponsesRequest, prepared: Prepared) -> None:
        self._counts = TokenCounts(prepared.prompt_tokens)
        self._items = OutputItems()
        self._number = 0  # of the next event
        self._cut = False
        form = given.text.format if given.text is not None else None
        tools = [tool.model_dump() for tool in given.tools or ()]
        choice = given.tool_choice
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now(),
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "model": service.name,
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": given.reasoning.effort if given.reasoning else None, "summary": None},
            "store": False,
            "temperature": given.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [{**tool, "strict": False} for tool in tools],
            "top_p": given.top_p,
            "truncation": "disabled",
        }

    def _response(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = {
            "input_tokens": self._counts.prompt,
            "input_tokens_details": {"cached_tokens": self._counts.cached},
            "output_tokens": self._counts.made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._counts.prompt + self._counts.made,
        }
        ended = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "output": self._items.all(),
            "incomplete_details": cut,
            "usage": counts if ended else None,
        }

    def _numbered(self, events: Iterable[tuple[str, dict[str, Any]]]) -> Iterable[bytes]:
        for kind, fields in events:
            yield event({"type": kind, "sequence_number": self._number, **fields}, kind)
            self._number += 1

    def begin(self) -> Iterable[bytes]:
        """An empty response."""
        kinds = ("response.created", "response.in_progress")
        yield from self._numbered((kind, {"response": self._response("in_progress")}) for kind in kinds)

    def add(self, piece: Piece) -> Iterable[bytes]:
        """What is new, in its item."""
        self._count(piece)
        yield from self._numbered(self._items.add(piece))

    def finish(self) -> Iterable[bytes]:
        """The whole."""
        yield from self._numbered(self._items.close())
        status = "incomplete" if self._cut else "completed"
        yield from self._numbered([(f"response.{status}", {"response": self._response(status)})])

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The error."""
        response = {**self._response("failed"), "error": {"code": error.code, "message": error.message}}
        yield from self._numbered([("response.failed", {"response": response})])

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        """response."""
        (reply,) = replies
        self._count(reply)
        list(self._items.add(reply))
        list(self._items.close())
        return self._response("incomplete" if self._cut else "completed")

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        self._cut = self._cut or piece.end == "length"
