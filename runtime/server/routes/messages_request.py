"""The bodies of Anthropic's messages, and how their blocks, tools and options become a `ChatSpec`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.requests.formats import ResponseFormat, json_schema_format
from mycli.runtime.server.requests.schemas import (
    MAX_CONTENT_PARTS,
    MAX_TOOLS,
    Content,
    ContentPart,
    ForModel,
    ForReply,
    LongText,
    Name,
    Parameters,
    Sampling,
    StopString,
    Strict,
    ToolName,
)
from mycli.runtime.server.routes.chat_spec import ChatSpec
from mycli.runtime.server.routes.context_edits import (
    ContextManagement,
    ThinkingEdit,
    ToolUsesEdit,
    UnservedEdit,
    clear_tool_uses,
)
from mycli.runtime.server.routes.wire import left_out_note, non_text_parts, text_of
from mycli.runtime.tokenizer.chat_template import Message, Tool, effort_arguments
from mycli.runtime.tokenizer.stream import MAX_STOPS

# Blocks of tools that Anthropic's servers run: their results are encrypted or mean nothing to another model.
_SERVER_BLOCKS = (
    *("server_tool_use", "redacted_thinking", "container_upload", "mcp_tool_listing", "tool_addition", "tool_removal"),
    *("fallback", "browser_state"),
)
_SERVER_SUFFIX = "_tool_result"  # of web search, code execution, tool search and others
# The first line of Claude Code's system prompt has another hash in each request, and no prompt would be found in the
# cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_CALLS, _RESULTS = ("tool_use", "mcp_tool_use"), ("tool_result", "mcp_tool_result")


class TextSource(Strict):
    """The text of a document; files and addresses are refused, nothing is ever fetched."""

    type: Annotated[str, Field(max_length=64)]
    data: LongText | None = None
    content: Content = None


class TextBlock(ContentPart):
    """A block of text: text itself, a document, or a search result."""

    source: TextSource | LongText | None = None
    title: LongText | None = None
    context: LongText | None = None
    content: Content = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None  # of a tool_reference


class MessageBlock(TextBlock):
    """A block of a message: text, document, tool call, tool result or thinking."""

    id: Annotated[str, Field(max_length=256)] = ""
    name: Annotated[str, Field(max_length=256)] = ""
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] = ""
    # Results of tools hold blocks, those of Anthropic's servers also an object.
    content: LongText | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)] | dict[str, Any] | None = None  # type: ignore[assignment]
    is_error: bool | None = None
    thinking: LongText | None = None


class InputMessage(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: LongText | Annotated[list[MessageBlock], Field(max_length=MAX_CONTENT_PARTS)]


class InputTool(Strict):
    """A tool with the JSON schema of its input; tools of other types than `custom` are Anthropic's own."""

    type: Annotated[str, Field(max_length=64)] | None = None
    name: ToolName | None = None
    description: LongText | None = None
    input_schema: Parameters | None = None
    strict: bool | None = None

    @property
    def callable(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _complete(self) -> "InputTool":
        if self.callable and (self.name is None or self.input_schema is None):
            raise ValueError(f"{'name' if self.name is None else 'input_schema'} is required")
        return self


class ToolChoice(Strict):
    """Which tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Whether the model reasons first, if its template has a switch, and whether its reasoning is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=1 << 31)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Strict):
    """The JSON schema of a reply."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The format of a reply, and how much effort it is worth."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: None = None


class CountRequest(ForModel):
    """The body of POST /v1/messages/count_tokens."""

    messages: list[InputMessage] = Field(min_length=1, max_length=4096)
    system: Content = None
    tools: list[InputTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the beta form of output_config.format
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)  # of vLLM


class MessagesRequest(CountRequest, ForReply):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=1 << 31)
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 31)
    deadline: float | None = Field(None, ge=0.1, le=86400)  # seconds after which the reply is to end

    @property
    def shows_reasoning(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


def _document(block: TextBlock, place: str) -> str:
    # Title, where it is from, and text, each on a line of its own.
    if block.type == "search_result":
        origin = block.source if isinstance(block.source, str) else ""
        text = _content(block, f"{place}.content")
        return "\n".join(part for part in (block.title or "", origin, text) if part)
    source = block.source
    if not isinstance(source, TextSource) or source.type not in ("text", "content"):
        kind = source.type if isinstance(source, TextSource) else "none"
        message = f"{place}.source.type: {kind!r} is not supported; this model reads text only"
        raise ApiError(400, message, "unsupported_content", param=f"{place}.source.type")
    text = source.data or "" if source.type == "text" else text_of(source.content, f"{place}.source.content")
    return "\n".join(part for part in (block.title or "", block.context or "", text) if part)


def _as_part(block: ContentPart, place: str) -> ContentPart:
    if not isinstance(block, TextBlock):
        return block
    if block.type in ("document", "search_result"):
        return ContentPart(type="text", text=_document(block, place))
    if block.type == "tool_reference":
        return ContentPart(type="text", text=block.tool_name or "")
    if block.type == "compaction":  # the summary of earlier messages, none where it failed
        return ContentPart(type="text", text=_content(block, f"{place}.content"))
    return block


def _content(block: TextBlock, place: str) -> str:
    content: Any = block.content
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise invalid_value(place, "must be a string or a list")
    parts = [_as_part(part, f"{place}.{index}") for index, part in enumerate(content)]
    return text_of(parts, place)


def _result_part(part: ContentPart, place: str, omitted: list[str]) -> ContentPart:
    read = part
    try:
        read = _as_part(part, place)
    except ApiError as error:
        if error.code != "unsupported_content":
            raise
    if non_text_parts([read]):
        omitted.append(f"block {part.type}")
        return ContentPart(type="text", text=left_out_note(part.type))
    return read


def _result(block: MessageBlock, place: str, omitted: list[str]) -> str:
    if isinstance(block.content, list):
        parts = [_result_part(part, f"{place}.{index}", omitted) for index, part in enumerate(block.content)]
        text = text_of(parts, place)
    else:
        text = _content(block, place)
    # Templates have no field for it. Many clients write it into the text as well.
    unmarked = block.is_error and not text.lstrip().lower().startswith(("error", "<tool_use_error"))
    return f"Error: {text}" if unmarked else text


def _system_text(system: Content) -> str:
    return _BILLING.sub("", text_of(system, "system"))


def _context_edits(body: CountRequest) -> Sequence[ThinkingEdit | ToolUsesEdit | UnservedEdit]:
    return () if body.context_management is None else body.context_management.edits


def _unthinking(body: CountRequest) -> tuple[set[int], int]:
    # The indices of messages whose reasoning is left out, and the number of their turns. A turn begins with a message
    # that has no tool results.
    limits = [edit.turns for edit in _context_edits(body) if isinstance(edit, ThinkingEdit)]
    keep = min((turns for turns in limits if turns is not None), default=len(body.messages))
    turns, begun, cleared = 0, False, set[int]()
    for index, message in reversed(list(enumerate(body.messages))):
        types = [] if isinstance(message.content, str) else [block.type for block in message.content]
        if message.role == "user" and not set(types) & set(_RESULTS):
            begun = False
        elif "thinking" in types:
            turns, begun = turns + (not begun), True
            cleared |= {index} if turns > keep else set()
    return cleared, max(turns - keep, 0)


def _block_messages(body: CountRequest) -> tuple[list[Message], list[str]]:
    """Return the messages of a conversation, and the types of blocks and edits left out. Raises ApiError."""
    # Templates expect a tool result as a message of its own.
    messages = [] if body.system is None else [Message("system", _system_text(body.system))]
    names: dict[str, str] = {}  # of called tools, by call id
    omitted = [f"edit {edit.type}" for edit in _context_edits(body) if isinstance(edit, UnservedEdit)]
    cleared, _ = _unthinking(body)
    for index, message in enumerate(body.messages):
        place = f"messages.{index}.content"
        blocks: Sequence[MessageBlock] = (
            [MessageBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        )
        texts: list[ContentPart] = []
        thinking, calls = "", []
        for number, block in enumerate(blocks):
            if block.type in _CALLS:
                names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"type": "function", "id": block.id, "function": function})
            elif block.type in _RESULTS:
                content = _result(block, f"{place}.{number}.content", omitted)
                name = names.get(block.tool_use_id, "")
                messages.append(Message("tool", content, name=name, tool_call_id=block.tool_use_id))
            elif block.type == "thinking":
                thinking += "" if index in cleared else block.thinking or ""
            elif block.type in _SERVER_BLOCKS or block.type.endswith(_SERVER_SUFFIX):
                omitted.append(f"block {block.type}")
            else:
                texts.append(_as_part(block, f"{place}.{number}"))
        if texts or calls or thinking or not blocks:
            messages.append(Message(message.role, text_of(texts, place), tuple(calls), thinking))
    return messages, omitted


def _input_tools(body: CountRequest) -> tuple[list[Tool], list[str]]:
    """Return the tools that can be called, and the types of those that cannot."""
    tools: list[Tool] = []
    omitted = []
    for tool in body.tools or ():
        if not tool.callable:
            omitted.append(tool.type or "")
            continue
        described = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **described, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    return tools, omitted


def _template_arguments(body: CountRequest) -> Mapping[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    thinking = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    return effort_arguments(effort) | thinking | (body.chat_template_kwargs or {})


def _format(body: MessagesRequest) -> ResponseFormat | None:
    config = None if body.output_config is None else body.output_config.format
    if config is None:
        return None if body.output_format is None else json_schema_format(body.output_format.schema_, "output_format")
    if body.output_format is not None:
        message = "output_format and output_config.format cannot be combined"
        raise ApiError(400, message, "invalid_value", param="output_format")
    return json_schema_format(config.schema_, "output_config.format")


def _is_continued(messages: Sequence[Message]) -> bool:
    # A trailing message of the assistant is the beginning of the reply.
    return len(messages) > 1 and messages[-1].role == "assistant" and not messages[-1].tool_calls


def edit_context(
    body: CountRequest, spec: ChatSpec, count: Callable[[ChatSpec], int]
) -> tuple[ChatSpec, list[dict[str, Any]]]:
    """Return what a request asks for after its edits of tool uses, and the descriptions of all edits that took effect.

    count: returns the number of tokens of a prompt.
    """
    applied = []
    cleared, turns = _unthinking(body)
    if cleared:
        unedited = replace(spec, messages=_block_messages(body.model_copy(update={"context_management": None}))[0])
        saved = max(count(unedited) - count(spec), 0)  # many templates leave old reasoning out in any case
        kind = next(edit.type for edit in _context_edits(body) if isinstance(edit, ThinkingEdit))
        applied.append({"type": kind, "cleared_thinking_turns": turns, "cleared_input_tokens": saved})
    messages = spec.messages
    for edit in _context_edits(body):
        if isinstance(edit, ToolUsesEdit):
            messages, description = clear_tool_uses(
                messages, edit, lambda edited: count(replace(spec, messages=edited))
            )
            applied += [] if description is None else [description]
    return replace(spec, messages=messages), applied


def counted_spec(body: CountRequest) -> ChatSpec:
    """Return the conversation whose tokens are to be counted. Raises ApiError."""
    messages, _ = _block_messages(body)
    tools, _ = _input_tools(body)
    return ChatSpec(
        messages=messages,
        sampling=Sampling.model_validate({}),
        tools=tools,
        choice="none" if body.tool_choice is not None and body.tool_choice.type == "none" else "auto",
        arguments=_template_arguments(body),
        continued=_is_continued(messages),
    )


def chat_spec(body: MessagesRequest) -> ChatSpec:
    """Return what the request asks for. Raises ApiError."""
    choice = body.tool_choice or ToolChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name: is required", "missing_required_parameter", param="tool_choice.name")
    settings = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "deadline")}
    sampling = Sampling.model_validate({**settings, "stop": body.stop_sequences or None})
    messages, omitted = _block_messages(body)
    tools, omitted_tools = _input_tools(body)
    return ChatSpec(
        messages=messages,
        sampling=sampling,
        tools=tools,
        choice="required" if choice.type in ("any", "tool") else choice.type,
        named=choice.name if choice.type == "tool" else None,
        omitted_tools=omitted_tools,
        omitted=omitted,
        strict=[tool.name for tool in body.tools or () if tool.strict and tool.name is not None],
        parallel=not choice.disable_parallel_tool_use,
        format=_format(body),
        arguments=_template_arguments(body),
        limit=body.max_tokens,
        # As Anthropic does: a reply that reaches the end of the context says so in its stop reason.
        clipped=True,
        continued=_is_continued(messages),
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
    )
