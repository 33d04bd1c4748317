"""What requests may hold: strict types and bounds for every field that is read.

A number is no string and true is no number; NaN and infinity are refused before (`runtime.utils.json_fields`). Fields
that are not named here are ignored, as clients send what other servers understand; fields that would change a reply and
are not done are refused by name.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mycli.runtime.server.api_error import ApiError
from mycli.runtime.tokenizer.stream import MAX_STOP_LENGTH, MAX_STOPS

LongText = Annotated[str, Field(max_length=1 << 22)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Strict(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


_Request = TypeVar("_Request", bound=Strict)


def validated(kind: type[_Request], value: Any) -> _Request:
    """`value` as a request of `kind`. Raises ApiError naming the first field at fault."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be an object, not {type(value).__name__}", "invalid_type")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        cause = first["msg"].removeprefix("Value error, ")
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise ApiError(400, f"{place or 'body'}: {cause}", code, param=place or None) from None


class ForModel(Strict):
    """A request to a model; None: whichever is served."""

    model: Name | None = None


class StreamOptions(Strict):
    """What a stream says beside the reply."""

    include_usage: bool | None = None


class Sampling(Strict):
    """How tokens are drawn and when a reply ends; None: as the model recommends."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=1024)
    stop: StopString | list[StopString] | None = None
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _few_stops(self) -> "Sampling":
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop: at most {MAX_STOPS} strings")
        return self

    @property
    def stops(self) -> list[str]:
        """The strings that end a reply."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class FunctionSpec(Strict):
    """A function that a model may call."""

    name: ToolName
    description: LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Strict):
    """A tool: only functions are known."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Strict):
    """A function that is to be called."""

    name: Name


class NamedTool(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """What was called, with its arguments as text of JSON."""

    name: Name
    arguments: LongText


class CalledTool(Strict):
    """A call in an earlier message of the assistant."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ContentPart(Strict):
    """A part of a message; only text is known, and nothing is ever fetched."""

    type: Annotated[str, Field(max_length=64)]
    text: LongText | None = None


Content = LongText | list[ContentPart] | None


class ChatMessage(Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[CalledTool] | None = Field(None, max_length=128)
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning: LongText | None = None
    reasoning_content: LongText | None = None


class SchemaFormat(Strict):
    """A JSON schema with its name."""

    name: Annotated[str, Field(max_length=256)] = "schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What a reply must be: anything, an object, of a schema, of an expression or of a grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: SchemaFormat | None = None
    regex: LongText | None = None
    lark: LongText | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema is missing")
        if self.type == "regex" and self.regex is None or self.type == "lark" and self.lark is None:
            raise ValueError(f"{self.type} is missing")
        return self


class ChatRequest(ForModel, Sampling):
    """The body of POST /v1/chat/completions."""

    model: Name
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    n: int | None = Field(None, ge=1, le=64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[ToolSpec] | None = Field(None, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
    functions: None = None
    audio: None = None


class CompletionRequest(ForModel, Sampling):
    """The body of POST /v1/completions."""

    model: Name
    prompt: LongText | list[LongText] | list[TokenId] | list[list[TokenId]]
    n: int | None = Field(None, ge=1, le=64)
    best_of: Literal[1] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    suffix: Literal[""] | None = None


class TokenizeRequest(ForModel):
    """The body of POST /tokenize: a text, or a conversation as its template writes it."""

    prompt: LongText | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    tools: list[ToolSpec] | None = Field(None, max_length=128)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(ForModel):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=1 << 20)
