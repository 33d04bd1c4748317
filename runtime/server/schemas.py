"""Request bodies: strict types and bounds for every field that is read.

Unknown fields are ignored: clients send what other servers understand. Fields that would change a reply and are not
implemented are refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails

from mycli.runtime.server.api_error import ApiError
from mycli.runtime.tokenizer.stream import MAX_STOP_LENGTH, MAX_STOPS

MAX_ITEMS = 1 << 14  # of a conversation in one field
MAX_CONTENT_PARTS = 1 << 12  # of a message
MAX_PROMPTS = 1 << 10
MAX_IDS = 1 << 20
LongText = Annotated[str, Field(max_length=1 << 22)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_CONSTRAINTS = (
    ("grammar", "json_schema", "structured_outputs")  # of llama.cpp and vLLM, for what OpenAI calls response_format
    + ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
)

_MESSAGES: Mapping[str, str] = {  # by pydantic's error types; bounds in braces are in its context
    "missing": "is required",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "string_unicode": "must be a string of Unicode characters",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "must be {expected}",
}


def _false_only(value: Any) -> Any:
    # Literal[False] compares with ==, which 0 passes.
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("must be false")
    return value


No = Annotated[Literal[False], BeforeValidator(_false_only)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _fail_fast(schema: Any) -> None:
    # An error takes a kilobyte: those of a list of a million wrong items would take a gigabyte, and minutes.
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        fields = not isinstance(schema.get("type"), str)  # the keys are names of fields, which may be "metadata"
        for key, part in schema.items():
            if fields or key not in ("metadata", "default", "cls"):
                _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Strict(BaseModel):
    """Part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


_Request = TypeVar("_Request", bound=Strict)


def validated(kind: type[_Request], value: Any) -> _Request:
    """Validate `value` as a request of `kind`. Raises ApiError naming the first field at fault."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be an object, not {type(value).__name__}", "invalid_type")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False), value) from None


def _explain(errors: Sequence[ErrorDetails], body: Any) -> ApiError:
    # A field that takes several types has an error for each: report those deepest inside the first field at fault.
    places = [_place(error, body) for error in errors]
    within = [place for place in places if place[: len(places[0])] == places[0]]
    place = max(within, key=len)
    chosen = [error for error, where in zip(errors, places, strict=True) if where == place]
    if too_long := [(error, where) for error, where in zip(errors, places, strict=True) if error["type"] == "too_long"]:
        chosen, place = [too_long[0][0]], too_long[0][1]
    name, causes = ".".join(map(str, place)), dict.fromkeys(map(_message, chosen))
    if any(error["type"] != "none_required" for error in chosen):
        cause = " or ".join(causes).replace(" or must be ", " or ")
    else:
        cause = "is not supported"
        if name in _CONSTRAINTS:
            cause += "; use response_format"
    code = "missing_required_parameter" if chosen[0]["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{name or 'body'}: {cause}", code, param=name or None)


def _message(error: ErrorDetails) -> str:
    message = _MESSAGES.get(error["type"])
    return error["msg"].removeprefix("Value error, ") if message is None else message.format(**error.get("ctx", {}))


def _place(error: ErrorDetails, body: Any) -> tuple[str | int, ...]:
    place: list[str | int] = []
    for part in error["loc"]:
        # pydantic adds the names of alternative types to the path; only keys and indices of the body are kept.
        known = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if known:
            body = body[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)


class ForModel(Strict):
    """A request to a model; None: the one that is served."""

    model: Name | None = None


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None


class Sampling(Strict):
    """Sampling settings and stop conditions; None: the model's default."""

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
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class FunctionSpec(Strict):
    """A function that a model may call."""

    name: ToolName
    description: LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Strict):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Strict):
    """The function to call."""

    name: Name


class NamedTool(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """A called function; its arguments are JSON in a string."""

    name: Name
    arguments: LongText


class CalledTool(Strict):
    """A tool call in an earlier message of the assistant."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ContentPart(Strict):
    """Part of a message; only text is supported, nothing is ever fetched."""

    type: Annotated[str, Field(max_length=64)]
    text: LongText | None = None


Content = LongText | Annotated[list[ContentPart], Field(max_length=MAX_CONTENT_PARTS)] | None


class ChatMessage(Strict):
    """A message of a conversation."""

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
    """The format of a reply: any text, a JSON object, a JSON schema, a regular expression or a Lark grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # for json_object, as in llama.cpp
    regex: LongText | None = None
    lark: LongText | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema is missing")
        if self.type == "regex" and self.regex is None or self.type == "lark" and self.lark is None:
            raise ValueError(f"{self.type} is missing")
        return self


class Constraints(Strict):
    """Constraints of other servers, refused rather than ignored: use `response_format`."""

    grammar: None = None
    json_schema: None = None
    structured_outputs: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    min_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=0)] | None = None
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None
    allowed_token_ids: None = None
    use_beam_search: No | None = None


class ChatRequest(ForModel, Sampling, Constraints):
    """The body of POST /v1/chat/completions."""

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
    continue_final_message: No | None = None  # of vLLM


class CompletionRequest(ForModel, Sampling, Constraints):
    """The body of POST /v1/completions."""

    prompt: (
        LongText
        | Annotated[list[LongText], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(max_length=MAX_IDS)]
        | Annotated[list[Annotated[list[TokenId], Field(max_length=MAX_IDS)]], Field(max_length=MAX_PROMPTS)]
    )
    n: int | None = Field(None, ge=1, le=64)
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    suffix: Literal[""] | None = None


class TokenizeRequest(ForModel):
    """The body of POST /tokenize: a text, or a conversation to render with the chat template."""

    prompt: LongText | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    tools: list[ToolSpec] | None = Field(None, max_length=128)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(ForModel):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=MAX_IDS)
