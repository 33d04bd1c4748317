"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's responses, without storage: clients send all messages."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.reply_reader import Piece
from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.routes.chat_spec import ChatSpec, effort_arguments, prepare_chat
from mycli.runtime.server.routes.response_items import OutputItems
from mycli.runtime.server.routes.wire import TokenCounts, call_fields, new_id, now, text_of
from mycli.runtime.server.schemas import (
    MAX_ITEMS,
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
    """A message, a tool call, its result, or reasoning."""

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
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """How much the model should reason."""

    effort: Effort | None = None


class ResponsesRequest(ForModel):
    """The body of POST /v1/responses."""

    input: LongText | Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]
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


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [] if body.instructions is None else [Message("system", body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message("user", body.input)]
    names: dict[str, str] = {}  # of called functions, by call id
    for index, item in enumerate(body.input):
        place = f"input.{index}"
        if item.type == "function_call":
            call = call_fields(item.name, item.arguments, item.call_id, f"{place}.arguments")
            names[item.call_id] = item.name
            if messages and messages[-1].role == "assistant":  # templates expect parallel calls in one message
                last = messages.pop()
                messages.append(Message("assistant", last.content, (*last.tool_calls, call), last.reasoning))
            else:
                messages.append(Message("assistant", "", (call,)))
        elif item.type == "function_call_output":
            content = text_of(item.output, f"{place}.output")
            messages.append(Message("tool", content, name=names.get(item.call_id, ""), tool_call_id=item.call_id))
        elif item.type == "message":
            if item.role is None:
                message = f"{place}.role: is required"
                raise ApiError(400, message, "missing_required_parameter", param=f"{place}.role")
            messages.append(Message(item.role, text_of(item.content, f"{place}.content")))
    return messages


def _spec(body: ResponsesRequest) -> ChatSpec:
    text_format = body.text.format if body.text is not None else None
    choice = body.tool_choice or "auto"
    if text_format is not None and text_format.type == "json_schema" and text_format.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", "missing_required_parameter", param="text.format.schema")
    response_format = None
    if text_format is not None:
        response_format = ResponseFormat(type=text_format.type, json_schema=text_format, schema=None)
    return ChatSpec(
        messages=_messages(body),
        sampling=Sampling.model_validate({"temperature": body.temperature, "top_p": body.top_p}),
        tools=_tools(body),
        choice="named" if isinstance(choice, NamedFunction) else choice,
        named=choice.name if isinstance(choice, NamedFunction) else None,
        parallel=body.parallel_tool_calls is not False,
        format=response_format,
        arguments=effort_arguments(None if body.reasoning is None else body.reasoning.effort),
        limit=body.max_output_tokens,
    )


def _tools(body: ResponsesRequest) -> list[Tool]:
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in body.tools or ()
    ]


async def responses(service: Service, request: Request) -> Response:
    """Reply to a conversation."""

    def prepare(body: ResponsesRequest) -> Prepared:
        return prepare_chat(service, _spec(body))

    body, prepared = await read_request(service, request, ResponsesRequest, prepare)
    rendering = ResponseRendering(service, body, prepared)
    return await answer(service, request, prepared, rendering, bool(body.stream))


async def input_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of an input."""

    def count(body: ResponsesRequest) -> int:
        spec = _spec(body)
        return len(service.chat_prompt(spec.messages, spec.offered_tools, spec.arguments))

    _, tokens = await read_request(service, request, ResponsesRequest, count)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})


class ResponseRendering:
    """Writes a reply as response, or as the events of its items."""

    def __init__(self, service: Service, body: ResponsesRequest, prepared: Prepared) -> None:
        self._counts = TokenCounts(prepared.prompt_tokens)
        self._items = OutputItems()
        self._event_number = 0
        self._cut = False
        text_format = body.text.format if body.text is not None else None
        text_fields = {"type": "text"}
        if text_format is not None:
            text_fields = text_format.model_dump(by_alias=True, exclude_none=True)
        tools = [tool.model_dump() for tool in body.tools or ()]
        choice = body.tool_choice
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now(),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": service.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": text_fields},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [{**tool, "strict": False} for tool in tools],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def _response(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = {
            "input_tokens": self._counts.prompt,
            "input_tokens_details": {"cached_tokens": self._counts.cached},
            "output_tokens": self._counts.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._counts.prompt + self._counts.generated,
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
            yield event({"type": kind, "sequence_number": self._event_number, **fields}, kind)
            self._event_number += 1

    def begin(self) -> Iterable[bytes]:
        kinds = ("response.created", "response.in_progress")
        yield from self._numbered((kind, {"response": self._response("in_progress")}) for kind in kinds)

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        yield from self._numbered(self._items.add(piece))

    def finish(self) -> Iterable[bytes]:
        yield from self._numbered(self._items.close())
        status = "incomplete" if self._cut else "completed"
        yield from self._numbered([(f"response.{status}", {"response": self._response(status)})])

    def failed(self, error: ApiError) -> Iterable[bytes]:
        response = {**self._response("failed"), "error": {"code": error.code, "message": error.message}}
        yield from self._numbered([("response.failed", {"response": response})])

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        (reply,) = replies
        self._count(reply)
        list(self._items.add(reply))
        list(self._items.close())
        return self._response("incomplete" if self._cut else "completed")

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        self._cut = self._cut or piece.end == "length"
