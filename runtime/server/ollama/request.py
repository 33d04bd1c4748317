"""Requests of Ollama's chat and generate, and what they ask for in the terms of the other interfaces.

Of the options of llama.cpp's runner those that change a reply are served or refused; those of placement and speed are
the server's.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mycli.runtime.sampling.params import MAX_TEMPERATURE
from mycli.runtime.server.http.api_error import ApiError, unsupported_parameter
from mycli.runtime.server.http.settings import ServerState
from mycli.runtime.server.ollama.keep_alive import keep_alive_seconds
from mycli.runtime.server.requests.fields import asks_nothing
from mycli.runtime.server.requests.formats import ResponseFormat, json_schema_format
from mycli.runtime.server.requests.schemas import (
    MAX_TOOLS,
    ForModel,
    LongText,
    Sampling,
    StopString,
    Strict,
    ToolSpec,
    validated,
)
from mycli.runtime.server.routes.chat_spec import ChatSpec
from mycli.runtime.tokenizer.chat_template import Message, effort_arguments
from mycli.runtime.tokenizer.stream import MAX_STOPS

# Option -> the values that ask for nothing.
_REFUSED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mirostat": (None, 0),
    "tfs_z": (None, 1),
    "typical_p": (None, 1),
}
_HARMLESS_OPTIONS = frozenset(
    (
        "num_keep",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "low_vram",
        "vocab_only",
        "use_mmap",
        "use_mlock",
        "num_thread",
        "numa",
        "f16_kv",
        "logits_all",
        "repeat_last_n",
        "penalize_newline",
        "mirostat_tau",
        "mirostat_eta",
        "embedding_only",
        "rope_frequency_base",
        "rope_frequency_scale",
        "draft_num_predict",
    )
)
_Level = Literal["low", "medium", "high", "max"]


def _checked_duration(value: Any) -> Any:
    if value is not None:
        keep_alive_seconds(value)
    return value


KeepAlive = Annotated[Any, BeforeValidator(_checked_duration)]


class OllamaOptions(Strict):
    """Sampling settings and limits; None: the model's default."""

    num_predict: int | None = Field(None, ge=-2, le=1 << 31)
    num_ctx: int | None = Field(None, ge=0, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)  # OpenAI's interface ends at 2
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None


class OllamaRequest(ForModel):
    """The fields that chat and generate share."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = Field(None, max_length=64)
    keep_alive: KeepAlive = None
    think: bool | _Level | Literal[""] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: bool | None = None  # prompts are never truncated
    shift: bool | None = None  # nor is a full context shifted

    @property
    def top(self) -> int | None:
        """Return the number of alternatives with logprobs per token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CalledOllamaFunction(Strict):
    """A called function; its arguments are an object."""

    index: int | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    description: str | None = None


class CalledOllamaTool(Strict):
    """A tool call in an earlier message of the assistant."""

    id: Annotated[str, Field(max_length=256)] | None = None
    function: CalledOllamaFunction


class OllamaMessage(Strict):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: LongText | None = None
    thinking: LongText | None = None
    images: list[Any] | None = Field(None, max_length=64)
    tool_calls: list[CalledOllamaTool] | None = Field(None, max_length=128)
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class OllamaChatRequest(OllamaRequest):
    """The body of POST /api/chat."""

    messages: list[OllamaMessage] | None = Field(None, max_length=4096)
    tools: list[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)


class OllamaGenerateRequest(OllamaRequest):
    """The body of POST /api/generate."""

    prompt: LongText | None = None
    system: LongText | None = None
    raw: bool | None = None
    suffix: LongText | None = None
    template: LongText | None = None
    context: list[int] | None = Field(None, max_length=1 << 20)
    images: list[Any] | None = Field(None, max_length=64)


def read_options(body: OllamaRequest, context: int) -> tuple[Sampling, int | None, list[str]]:
    """Return the sampling settings, the limit of tokens (None: the rest of the context) and what is left out.

    Raises ApiError for a value out of range and for an option that would change the reply.
    """
    raw = body.options or {}
    try:
        options = validated(OllamaOptions, raw)
    except ApiError as error:
        name = f"options.{error.param}" if error.param else "options"
        raise ApiError(400, f"options.{error.message}", error.code, param=name) from None
    omitted = []
    for name, value in raw.items():
        if name in OllamaOptions.model_fields or name in _HARMLESS_OPTIONS:
            continue
        neutral = _REFUSED_OPTIONS.get(name)
        if neutral is None:
            omitted.append(f"option {name[:60]}" if name.isidentifier() else "option unprintable")
        elif not asks_nothing(value, neutral):
            place = f"options.{name}"
            raise unsupported_parameter(place, "is not supported")
    if options.num_ctx is not None and options.num_ctx > context:
        omitted.append(f"option num_ctx above {context}")
    names = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    fields = {name: getattr(options, name) for name in names}
    if options.stop == []:
        fields["stop"] = None
    sampling = Sampling.model_validate({**fields, "repetition_penalty": options.repeat_penalty})
    sampling = sampling.model_copy(update={"temperature": options.temperature})
    limit = options.num_predict
    return sampling, limit if limit is not None and limit > 0 else None, omitted  # 0 is no limit in Ollama, either


def read_format(body: OllamaRequest) -> ResponseFormat | None:
    """Return the format that a reply must have; None for any text."""
    if not body.format:
        return None
    if isinstance(body.format, dict):
        return json_schema_format(body.format, "format")
    return ResponseFormat.model_validate({"type": "json_object"}).at("format")


def ollama_spec(
    body: OllamaRequest, messages: Sequence[Message], options: tuple[Sampling, int | None, list[str]]
) -> ChatSpec:
    """Return what chat and generate ask for alike; `options`: as `read_options` returns them."""
    sampling, limit, omitted = options
    return ChatSpec(
        messages=messages,
        sampling=sampling,
        omitted=omitted,
        format=read_format(body),
        arguments=_think_arguments(body.think),
        limit=limit,
        clipped=True,  # a limit larger than the context ends at the context, as with Ollama
        top=body.top,
    )


def _think_arguments(think: bool | str | None) -> dict[str, Any]:
    if think is None or think == "":
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    return {"enable_thinking": True, **effort_arguments(think)}


def refuse_images(images: list[Any] | None, place: str) -> None:
    """Raise ApiError for images: nothing here reads them."""
    if images:
        message = f"{place}: is not supported; this model reads text only"
        raise ApiError(400, message, "unsupported_content", param=place)


def refuse_fields(body: OllamaGenerateRequest) -> None:
    """Raise ApiError for a field of generate that would change the reply."""
    remedies = {"template": "", "context": "; send the conversation to /api/chat"}
    for name, remedy in remedies.items():
        if getattr(body, name):
            raise unsupported_parameter(name, f"is not supported{remedy}")
    refuse_images(body.images, "images")


def shown_name(body: ForModel, server: ServerState) -> str:
    """Return the name that a response shows: the one that the client sent."""
    return body.model or server.name
