"""Request bodies: strict types and bounds for every field that is read.

Fields that are not read here are refused or ignored as `fields` says.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, ErrorDetails, ValidationError
from pydantic_core.core_schema import no_info_before_validator_function

from mycli.runtime.engine.sequence import MAX_BEAMS, MAX_PENALTY, BeamOptions
from mycli.runtime.server.http.api_error import ApiError, invalid_value, unsupported_parameter
from mycli.runtime.tokenizer.chat_template import Effort
from mycli.runtime.tokenizer.stream import MAX_STOP_LENGTH, MAX_STOPS, TextRules

MAX_ITEMS = 1 << 14  # of a conversation in one field
MAX_CONTENT_PARTS = 1 << 12  # of a message
MAX_PROMPTS = 1 << 10
MAX_TOOLS = 1 << 10  # agents with MCP servers send hundreds
MAX_IDS = 1 << 20
MAX_BAD_WORDS = 1 << 10
LongText = Annotated[str, Field(max_length=1 << 22)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
TokenLimit = Literal[-1] | Annotated[int, Field(ge=1, le=1 << 31)]  # -1: no limit, as in llama.cpp
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]

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
    # Literal[False] compares with ==, which 0 passes, and its message has Python's spelling.
    if value is not False:
        raise ValueError("must be false")
    return value


No = Annotated[Literal[False], BeforeValidator(_false_only)]
# JSON Schema's true admits any arguments, as an empty schema does.
Parameters = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is True else value)]
Verbosity = Literal["low", "medium", "high"]  # only "medium" can be done: no template has a switch for it


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _adapt(schema: Any) -> None:
    # An error takes a kilobyte: a list of a million wrong items would take a gigabyte, and minutes.
    if isinstance(schema, dict):
        if schema.get("type") == "int":
            # The JSON of Lua, Go and others has one type of number: Home Assistant sends num_ctx as 8192.0.
            integer = dict(schema)
            schema.clear()
            schema.update(no_info_before_validator_function(_whole, integer))
            return
        if schema.get("type") == "function-before" and schema["function"]["function"] is _whole:
            return
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        fields = not isinstance(schema.get("type"), str)  # the keys are names of fields, which may be "metadata"
        for key, part in schema.items():
            if fields or key not in ("metadata", "default", "cls"):
                _adapt(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _adapt(part)


class Strict(BaseModel):
    """Part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _adapt(schema)
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
    service_tier: Any = None  # "flex": after interactive requests; others are all the same


class ForReply(ForModel):
    """A request for a reply of a model; stream: as server-sent events."""

    stream: bool | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Return whether the client gets the reasoning."""
        return True


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # of OpenAI: padding, which nothing here needs
    continuous_usage_stats: bool | None = None  # of vLLM: the usage so far in every chunk


class StreamFigures(Strict):
    """Figures that a stream has in more events than the last, in the fields of llama.cpp."""

    timings_per_token: bool | None = None  # the speed so far
    return_progress: bool | None = None  # the number of prompt tokens that are computed, before the first token


class Sampling(Strict):
    """Sampling settings and stop conditions; None: the model's default."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    repeat_penalty: float | None = Field(None, ge=0.01, le=10)  # the same in llama.cpp
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=1024)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0, le=1 << 31)  # of vLLM: before any stop token or stop string counts
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)] | None = None  # of vLLM
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None  # of vLLM
    include_stop_str_in_output: bool | None = None  # of vLLM
    skip_special_tokens: bool | None = None  # of vLLM and SGLang
    deadline: float | None = Field(None, ge=0.1, le=86400)  # seconds after which the reply is to end

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def text_rules(self) -> TextRules:
        included, shown = bool(self.include_stop_str_in_output), self.skip_special_tokens is False
        return TextRules(self.stops, self.min_tokens or 0, included, shown)


class PromptTruncation(Strict):
    """The number of tokens to cut a prompt to, in the fields of vLLM; -1: as many as leave room for the reply."""

    truncate_prompt_tokens: TokenLimit | None = None
    truncation_side: Literal["left", "right"] | None = None  # left: the last tokens stay

    def cut(self, ids: list[int], room: int) -> list[int]:
        """Return the tokens of a prompt that stay; `room`: the number of tokens that leaves room for the reply."""
        if self.truncate_prompt_tokens is None:
            return ids
        count = max(room, 1) if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return ids[:count] if self.truncation_side == "right" else ids[-count:]


class BeamFields(Strict):
    """Beam search, in the fields of vLLM and transformers: `best_of` beams, `n` unless it is set."""

    use_beam_search: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_BEAMS)
    length_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    early_stopping: bool | Literal["never"] | None = None

    def beams(self, replies: int) -> BeamOptions | None:
        """Return the options of a search for `replies` replies, None without one. Raises ApiError."""
        width = self.best_of or replies
        if not self.use_beam_search:
            if self.best_of not in (None, 1, replies):  # as many as are returned are no choice
                raise unsupported_parameter("best_of", "needs use_beam_search")
            return None
        if width < replies:
            raise invalid_value("best_of", f"at least n, which is {replies}")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamOptions(width, penalty, self.early_stopping or False)


ThinkingTokens = Literal[-1] | Annotated[int, Field(ge=0, le=1 << 31)]  # -1: any number


class ThinkingBudget(Strict):
    """The number of tokens of reasoning, in the fields of vLLM and llama.cpp; the first that is set counts."""

    thinking_token_budget: ThinkingTokens | None = None
    reasoning_budget_tokens: ThinkingTokens | None = None
    thinking_budget_tokens: ThinkingTokens | None = None

    def thinking_budget(self, also: int | None = None) -> int | None:
        """Return the budget, or `also` if none is set; None for any number of tokens."""
        budgets = (self.thinking_token_budget, self.reasoning_budget_tokens, self.thinking_budget_tokens, also)
        chosen = next((budget for budget in budgets if budget is not None), None)
        return None if chosen == -1 else chosen


class ReasoningOptions(Strict):
    """How much the model should reason: effort in words, or a number of tokens."""

    effort: Effort | None = None
    max_tokens: ThinkingTokens | None = None
    enabled: bool | None = None


class FunctionSpec(Strict):
    """A function that a model may call."""

    name: ToolName
    description: LongText | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolSpec(Strict):
    """A tool; only functions can be called."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    function: FunctionSpec | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ToolSpec":
        if self.type == "function" and self.function is None:
            raise ValueError("function is required")
        return self


class FunctionName(Strict):
    """The function to call."""

    name: Name


class NamedTool(Strict):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """A subset of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Strict):
    """The choice of a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Strict):
    """A called function; its arguments are JSON in a string, or an object as some clients send them."""

    name: Name
    arguments: LongText | dict[str, Any] | None = None


class CustomCall(Strict):
    """A called custom tool, whose input is a text."""

    name: Name
    input: LongText


class CalledTool(Strict):
    """A tool call in an earlier message of the assistant."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def _complete(self) -> "CalledTool":
        if self.custom is None and self.function is None:
            raise ValueError("function is required")
        return self


class ContentPart(Strict):
    """Part of a message; only text is supported, nothing is ever fetched."""

    type: Annotated[str, Field(max_length=64)]
    text: LongText | None = None
    refusal: LongText | None = None  # the text of a part of type refusal


Content = LongText | Annotated[list[ContentPart], Field(max_length=MAX_CONTENT_PARTS)] | None


class ChatPart(ContentPart):
    """Part of a message of chat: text, or the assistant's reasoning, which clients name in several ways."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"type": "text", "text": value} if isinstance(value, str) else value  # as in vLLM

    thinking: Content = None  # of Mistral, a list, and of Anthropic
    reasoning: LongText | None = None  # of LangChain
    summary: Content = None  # of OpenAI's responses


class ChatMessage(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: LongText | Annotated[list[ChatPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    refusal: LongText | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[CalledTool] | None = Field(None, max_length=128)
    function_call: CalledFunction | None = None  # the older form of a single call
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning: LongText | None = None
    reasoning_content: LongText | None = None
