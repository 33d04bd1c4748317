"""The body of OpenAI's responses, and how its items, tools and options become a `ChatSpec`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mycli.runtime.server.http.api_error import ApiError, unsupported_parameter
from mycli.runtime.server.requests.formats import Constraints, ResponseFormat, SchemaFormat, output_format
from mycli.runtime.server.requests.schemas import (
    MAX_CONTENT_PARTS,
    MAX_ITEMS,
    MAX_TOOLS,
    Content,
    ContentPart,
    ForReply,
    LongText,
    Name,
    No,
    Parameters,
    ReasoningOptions,
    Sampling,
    StreamOptions,
    Strict,
    ThinkingBudget,
    TokenLimit,
    ToolName,
    Verbosity,
)
from mycli.runtime.server.routes.chat_spec import ChatSpec
from mycli.runtime.tokenizer.chat_template import Message, Tool, effort_arguments

LOGPROBS = "message.output_text.logprobs"
ItemType = Annotated[str, Field(min_length=1, max_length=64)]
ItemId = Annotated[str, Field(max_length=256)]


class OutputPart(ContentPart):
    """Part of a tool's output: content, or what a shell command has printed, which has no type."""

    type: Annotated[str, Field(max_length=64)] = ""
    stdout: LongText | None = None
    stderr: LongText | None = None
    outcome: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> "OutputPart":
        if not self.type and self.outcome is None:
            raise ValueError("type is required")
        return self


class InputItem(Strict):
    """A message, a tool call, its result, reasoning, or a reference to an earlier item."""

    type: ItemType | None = None
    id: ItemId | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    summary: list[ContentPart] | None = Field(None, max_length=MAX_CONTENT_PARTS)
    call_id: ItemId | None = None
    name: ItemId = ""
    namespace: ItemId | None = None
    arguments: LongText | dict[str, Any] = ""  # an object in a tool_search_call
    input: LongText = ""
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None  # of an apply_patch_call
    # An object in a computer_call_output.
    output: LongText | Annotated[list[OutputPart], Field(max_length=MAX_CONTENT_PARTS)] | dict[str, Any] | None = None
    error: LongText | dict[str, Any] | None = None
    status: ItemType | None = None


class CustomFormat(Strict):
    """The format of the input of a custom tool."""

    type: ItemType
    syntax: ItemType | None = None
    definition: LongText | None = None


class SimpleTool(Strict):
    """A function, a custom tool, or a tool of another type, which cannot be called here."""

    type: ItemType
    name: ToolName | None = None
    description: LongText | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    format: CustomFormat | None = None

    @model_validator(mode="after")
    def _complete(self) -> "SimpleTool":
        if self.type in ("function", "custom", "namespace") and self.name is None:
            raise ValueError("name is required")
        return self


class ResponseTool(SimpleTool):
    """A tool, or a namespace of tools."""

    tools: list[SimpleTool] | None = Field(None, max_length=MAX_TOOLS)


class ChosenTool(Strict):
    """The choice of one tool, or of a subset of the tools."""

    type: ItemType
    name: Name | None = None
    namespace: ItemId | None = None
    mode: Literal["auto", "required"] | None = None
    tools: "list[ChosenTool] | None" = Field(None, max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _complete(self) -> "ChosenTool":
        if self.type in ("function", "custom") and self.name is None:
            raise ValueError("name is required")
        if self.type == "allowed_tools" and (self.mode is None or not self.tools):
            raise ValueError("mode and tools are required")
        return self


class TextFormat(SchemaFormat):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponsesRequest(ForReply, Sampling, Constraints, ThinkingBudget):
    """The body of POST /v1/responses."""

    input: LongText | Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]
    instructions: LongText | None = None
    previous_response_id: ItemId | None = None
    max_output_tokens: TokenLimit | None = None
    stream_options: StreamOptions | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "web_search_call.results",
                "web_search_call.action.sources",
                "file_search_call.results",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "message.input_image.image_url",
            ]
        ]
        | None
    ) = Field(None, max_length=64)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)  # of vLLM
    include_reasoning: bool | None = None  # of vLLM
    background: No | None = None

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives at each token; None for no log-probabilities."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None


@dataclass(frozen=True)
class ToolIdentity:
    """The client's name of a tool, which the model knows under a single name."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool for the model, which has no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace[-1] in '._' else '.'}{name}"


@dataclass(frozen=True)
class CallableTools:
    """The tools that a model may call, who they are for the client, and what was left out."""

    tools: Sequence[Tool]
    identities: Mapping[str, ToolIdentity]
    omitted_types: Sequence[str]
    omitted: Sequence[str]
    strict: Sequence[str]


def callable_tools(body: ResponsesRequest) -> CallableTools:
    """Return functions and custom tools, those of namespaces included; other types cannot be called here."""
    tools: list[Tool] = []
    identities: dict[str, ToolIdentity] = {}
    types, omitted, strict = [], [], []
    for outer in body.tools or ():
        spaced = outer.type == "namespace"
        for tool in (outer.tools or ()) if spaced else (outer,):
            if tool.type not in ("function", "custom"):
                types.append(tool.type)
                continue
            namespace = outer.name if spaced else None
            custom = tool.type == "custom"
            name = flat_name(tool.name or "", namespace)
            identities[name] = ToolIdentity(tool.name or "", namespace, custom)
            if custom and tool.format is not None and tool.format.definition is not None:
                omitted.append(f"grammar of tool {tool.name}")
            if tool.strict:
                strict.append(name)
            tools.append({"type": "function", "function": _function(name, tool)})
    return CallableTools(tools, identities, types, omitted, strict)


def _function(name: str, tool: SimpleTool) -> dict[str, Any]:
    description = {} if tool.description is None else {"description": tool.description}
    if tool.type == "function":
        return {"name": name, **description, **({} if tool.parameters is None else {"parameters": tool.parameters})}
    # A custom tool takes a text. Its grammar is described: it cannot be enforced within a JSON string.
    text = {"type": "string"}
    if tool.format is not None and tool.format.definition is not None:
        text["description"] = f"matches this {tool.format.syntax or ''} grammar:\n{tool.format.definition}"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": name, **description, "parameters": parameters}


def _choice(choice: str | ChosenTool | None) -> tuple[str, str | None, Sequence[str] | None]:
    # auto, none or required; the only tool that may be called; the tools that may be called.
    if not isinstance(choice, ChosenTool):
        return choice or "auto", None, None
    if choice.type == "allowed_tools":
        chosen = [tool for tool in choice.tools or () if tool.name is not None]
        names = [flat_name(tool.name or "", tool.namespace) for tool in chosen]
        return choice.mode or "auto", None, names
    if choice.type not in ("function", "custom"):
        raise unsupported_parameter("tool_choice", f"tools of type {choice.type} cannot be called here")
    return "required", flat_name(choice.name or "", choice.namespace), None


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    text_format = body.text.format if body.text is not None else None
    other = output_format(body)
    if text_format is None or text_format.type == "text":
        return other
    if other is not None:
        raise ApiError(400, "text.format cannot be combined with another format", "invalid_value", param="text.format")
    if text_format.type == "json_schema" and text_format.schema_ is None:
        raise ApiError(400, "text.format.schema is missing", "missing_required_parameter", param="text.format.schema")
    return ResponseFormat(type=text_format.type, json_schema=text_format, schema=None).at("text.format")


def response_spec(
    body: ResponsesRequest, messages: Sequence[Message], omitted: Sequence[str], tools: CallableTools
) -> ChatSpec:
    """Return what the request asks for; `messages`, `omitted`: of its input. Raises ApiError."""
    choice, named, allowed = _choice(body.tool_choice)
    limit = body.max_output_tokens
    reasoning = body.reasoning or ReasoningOptions()
    verbosity = ["field text.verbosity"] if body.text is not None and body.text.verbosity in ("low", "high") else []
    if (
        named is not None
        and named in tools.identities
        and f"grammar of tool {tools.identities[named].name}" in tools.omitted
    ):
        raise unsupported_parameter("tool_choice", f"the grammar of {named[:60]!r} cannot be enforced")
    return ChatSpec(
        messages=messages,
        sampling=body,
        tools=tools.tools,
        choice=choice,
        named=named,
        allowed=allowed,
        omitted_tools=tools.omitted_types,
        omitted=[*tools.omitted, *omitted, *verbosity],
        strict=tools.strict,
        parallel=body.parallel_tool_calls is not False,
        format=_format(body),
        arguments=effort_arguments(reasoning.effort) | (body.chat_template_kwargs or {}),
        limit=None if limit == -1 else limit,
        top=body.logprobs,
        place="input",
        thinking_budget=body.thinking_budget(reasoning.max_tokens),
    )
