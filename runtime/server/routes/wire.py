"""JSON that several endpoints read and write: messages, usage, tokens with their log-probabilities, ids."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import event
from mycli.runtime.server.requests.schemas import (
    CalledTool,
    ChatMessage,
    ChatPart,
    ContentPart,
    StreamFigures,
    StreamOptions,
    ToolSpec,
)
from mycli.runtime.server.service import Prepared
from mycli.runtime.tokenizer.chat_template import Message, Role, Tool
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.json_fields import strict_json

LEAST_LOGPROB = -9999.0  # for a probability of zero: JSON has no infinity, and OpenAI uses this number
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
_REASONING_PARTS = ("thinking", "reasoning", "redacted_thinking")  # the last one is encrypted, and has no text


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


def non_text_parts(content: str | Sequence[ContentPart] | None) -> list[str]:
    """Return the types of the parts of a tool's result that are no text."""
    parts = () if content is None or isinstance(content, str) else content
    return [part.type for part in parts if part.type not in _TEXT_PARTS]


def left_out_note(kind: str) -> str:
    """Return the text that stands for a part of a tool's result that is no text."""
    # An agent that has looked at an image sends it again with each later turn: a refusal would end the conversation.
    return f"[{kind}: left out, this model reads text only]"


def text_of(content: str | Sequence[ContentPart] | None, place: str, result: bool = False) -> str:
    """Return the text of a message. Raises ApiError for parts other than text: nothing is ever fetched.

    result: of a tool, whose other parts are replaced by a note.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        field = f"{place}.{index}"
        text = part.refusal if part.type == "refusal" and part.text is None else part.text
        if part.type not in _TEXT_PARTS and result:
            text = left_out_note(part.type)
        elif part.type not in _TEXT_PARTS:
            message = f"{field}.type: {part.type!r} is not supported; this model reads text only"
            raise ApiError(400, message, "unsupported_content", param=f"{field}.type")
        if text is None:
            raise ApiError(400, f"{field}.text: is required", "missing_required_parameter", param=f"{field}.text")
        texts.append(text)
    return "\n".join(texts)


def call_fields(name: str, arguments: str | Mapping[str, Any] | None, call_id: str) -> dict[str, Any]:
    """Return a tool call as chat templates expect it, with its arguments parsed."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": _parsed_arguments(arguments)}}


def _parsed_arguments(arguments: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        values = strict_json(arguments.encode()) if arguments.strip() else None
    except ValueError:
        values = arguments
    if values is None or isinstance(values, dict):
        return values or {}
    # A model wrote them, or its limit cut them, and clients send them again with each later turn: a refusal would end
    # the conversation. They are wrapped as in Anthropic's interface.
    return {"INVALID_JSON": arguments}


def _called(call: CalledTool) -> tuple[str, str | Mapping[str, Any] | None]:
    if call.function is not None:
        return call.function.name, call.function.arguments
    assert call.custom is not None  # `CalledTool` requires a function otherwise
    return call.custom.name, {"input": call.custom.input}  # as for custom tools in the interface of responses


def _reasoning_of(part: ChatPart, place: str) -> str:
    if isinstance(part.thinking, list):
        return text_of(part.thinking, f"{place}.thinking")
    return part.thinking or part.reasoning or part.text or text_of(part.summary, f"{place}.summary")


def chat_messages(items: Sequence[ChatMessage]) -> list[Message]:
    """Convert messages of OpenAI's chat to those of templates. Raises ApiError."""
    messages: list[Message] = []
    names: dict[str, str] = {}  # of called functions, by call id
    for index, item in enumerate(items):
        calls = []
        for call in item.tool_calls or ():
            name, arguments = _called(call)
            calls.append(call_fields(name, arguments, call.id or ""))
            names[call.id or ""] = name
        if item.function_call is not None:
            calls.append(call_fields(item.function_call.name, item.function_call.arguments, ""))
        role: Role = "tool" if item.role == "function" else item.role
        name = item.name or (names.get(item.tool_call_id or "", "") if role == "tool" else "")
        place, parts, thoughts = f"messages.{index}.content", item.content, list[str]()
        if item.role == "assistant" and isinstance(parts, list):
            thoughts = [
                _reasoning_of(part, f"{place}.{number}")
                for number, part in enumerate(parts)
                if part.type in _REASONING_PARTS
            ]
            parts = [part for part in parts if part.type not in _REASONING_PARTS]
        reasoning = item.reasoning or item.reasoning_content or "\n".join(filter(None, thoughts))
        content = text_of(parts, place, role == "tool") or item.refusal or ""
        messages.append(Message(role, content, tuple(calls), reasoning, name, item.tool_call_id or ""))
    return messages


def strict_tools(tools: Sequence[ToolSpec] | None) -> list[str]:
    """Return the names of functions whose calls must match their schemas."""
    return [tool.function.name for tool in tools or () if tool.function is not None and tool.function.strict]


def chat_tools(tools: Sequence[ToolSpec] | None) -> tuple[list[Tool], list[str]]:
    """Convert tools of OpenAI's chat to those of templates; also return the types of tools that cannot be called."""
    functions: list[Tool] = []
    omitted = []
    for tool in tools or ():
        if tool.function is None:
            omitted.append(tool.type)
        else:
            functions.append(
                {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
            )
    return functions, omitted


class TokenCounts:
    """Counts the tokens of a request: its prompts, and its replies as their pieces come."""

    def __init__(self, prepared: Prepared) -> None:
        self.prompt, self.generated, self.reasoning = prepared.prompt_tokens, 0, 0
        self._figures = prepared.figures

    def add(self, piece: Piece) -> None:
        """Count the tokens of one more piece."""
        self.generated += len(piece.tokens)
        self.reasoning += piece.reasoning_tokens

    @property
    def cached(self) -> int:
        return self._figures.cached

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage` of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class OpenAIRendering:
    """The chunks of OpenAI's chat and completions.

    head: the fields that all chunks share; figures: those that more chunks than the last have.
    """

    def __init__(
        self, prepared: Prepared, head: dict[str, Any], options: StreamOptions | None, figures: StreamFigures
    ) -> None:
        self._counts, self._head = TokenCounts(prepared), head
        self._prepared, self._unfinished = prepared, prepared.replies
        self._began, self._first = time.perf_counter(), 0.0
        self._timed, self._shows_progress = bool(figures.timings_per_token), bool(figures.return_progress)
        self._progress = dict[int, int]()  # prompt tokens by reply
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_so_far = self._include_usage and options is not None and bool(options.continuous_usage_stats)

    def _count(self, piece: Piece) -> None:
        self._counts.add(piece)
        self._first = self._first or time.perf_counter()
        self._unfinished -= piece.end is not None

    def _progress_events(self, piece: Piece, choice: dict[str, Any]) -> Iterable[bytes]:
        yield from self._progress_event(piece, {**self._head, "choices": [choice]})

    def _progress_event(self, piece: Piece, fields: dict[str, Any]) -> Iterable[bytes]:
        if self._shows_progress and piece.prompt_tokens > self._progress.get(piece.index, 0):
            self._progress[piece.index] = piece.prompt_tokens
            progress = {
                "total": len(self._prepared.prompts[self._prepared.prompt_of(piece.index)]),
                "cache": piece.cached_tokens,
                "processed": piece.prompt_tokens,
                "time_ms": int((time.perf_counter() - self._began) * 1000),
            }
            yield event({**fields, "prompt_progress": progress})

    def _choice_event(self, choice: dict[str, Any], fields: Mapping[str, Any] | None = None) -> bytes:
        usage = {"usage": self._counts.usage()} if self._usage_so_far else {}
        last = choice["finish_reason"] is not None and not self._unfinished and not self._include_usage
        timings = {"timings": self._all_timings()} if last or (self._timed and self._first) else {}
        return event({**self._head, "choices": [choice], **(fields or {}), **usage, **timings})

    def _summary(self) -> dict[str, Any]:
        return {"usage": self._counts.usage(), "timings": self._all_timings()}

    def _all_timings(self) -> dict[str, Any]:
        return self._timings(self._counts.prompt, self._counts.cached, self._counts.generated)

    def _timings(self, prompt: int, cached: int, generated: int) -> dict[str, Any]:
        # As llama.cpp's server has them: Open WebUI and llama-swap show the speed from them.
        now, first = time.perf_counter(), self._first
        if not first:  # a reply that is not streamed
            ttft = self._prepared.figures.ttft
            first = now if ttft is None else self._began + ttft
        spans = (
            ("prompt", prompt - cached, first - self._began),
            ("predicted", generated, now - first),
        )
        timings: dict[str, Any] = {"cache_n": cached}
        for name, tokens, seconds in spans:
            timings |= {
                f"{name}_n": tokens,
                f"{name}_ms": round(seconds * 1000, 3),
                f"{name}_per_token_ms": round(seconds * 1000 / tokens, 3) if tokens else 0.0,
                f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else 0.0,
            }
        return timings

    def finish(self) -> Iterable[bytes]:
        if self._include_usage:
            yield event({**self._head, "choices": [], **self._summary()})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield event({"error": error.fields()})
        yield b"data: [DONE]\n\n"


def logprob_fields(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """Return a token's text, log-probability and bytes, as they are in all interfaces."""
    # `bytes` because a token may be part of a character, which its text cannot show.
    data = tokenizer.token_bytes(token)
    number = round(logprob, 6) if math.isfinite(logprob) else LEAST_LOGPROB
    return {"token": data.decode("utf-8", "replace"), "logprob": number, "bytes": list(data)}


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], most: int | None = None) -> dict[str, Any]:
    """Return `logprobs` of OpenAI's chat, with `most` alternatives; None: all."""
    content = [
        {
            **logprob_fields(tokenizer, item.token, item.logprob),
            "top_logprobs": [logprob_fields(tokenizer, token, logprob) for token, logprob in item.top[:most]],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[int | TokenLogprob], offset: int, most: int
) -> tuple[dict[str, Any], int]:
    """Return `logprobs` of OpenAI's completions, with `most` alternatives, and the `offset` of the next token's text.

    A bare token id stands for the first token of a prompt, which has no log-probability.
    """
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for item in logprobs:
        token = item if isinstance(item, int) else item.token
        entry = logprob_fields(tokenizer, token, 0.0 if isinstance(item, int) else item.logprob)
        likeliest: dict[str, float] = {}
        for top in () if isinstance(item, int) else (*item.top[:most], (token, item.logprob)):
            other = logprob_fields(tokenizer, *top)
            # Several tokens may have the same text: the likeliest stands for all.
            likeliest[other["token"]] = max(other["logprob"], likeliest.get(other["token"], -math.inf))
        lists["tokens"].append(entry["token"])
        lists["token_logprobs"].append(None if isinstance(item, int) else entry["logprob"])
        lists["top_logprobs"].append(None if isinstance(item, int) else likeliest)
        lists["text_offset"].append(offset)
        offset += len(entry["token"])
    return lists, offset
