"""What several endpoints read and write alike: messages, usage, tokens with their probabilities, ids."""

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.reply_reader import Piece
from mycli.runtime.server.schemas import ChatMessage, Content, ToolSpec
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.json_fields import strict_json

LEAST_LOGPROB = -9999.0  # what JSON is told for a probability of zero
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")


def new_id(prefix: str) -> str:
    """An id that no other reply has."""
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def text_of(content: Content, place: str) -> str:
    """The text of a message. Raises ApiError for parts that are no text: nothing is ever fetched."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        where = f"{place}.{index}"
        if part.type not in _TEXT_PARTS:
            message = f"{where}.type: {part.type!r} is not supported: this model reads text"
            raise ApiError(400, message, "unsupported_content", param=f"{where}.type")
        if part.text is None:
            raise ApiError(400, f"{where}.text: is required", "missing_required_parameter", param=f"{where}.text")
        texts.append(part.text)
    return "\n".join(texts)


def call_fields(name: str, arguments: str, identity: str, place: str) -> dict[str, Any]:
    """A call as chat templates read it, its arguments as an object. Raises ApiError."""
    try:
        values = strict_json(arguments.encode()) if arguments.strip() else {}
    except ValueError as error:
        raise ApiError(400, f"{place}: not JSON: {error}", "invalid_value", param=place) from None
    if not isinstance(values, dict):
        raise ApiError(400, f"{place}: must be an object", "invalid_value", param=place)
    return {"type": "function", "id": identity, "function": {"name": name, "arguments": values}}


def chat_messages(given: Sequence[ChatMessage]) -> list[Message]:
    """Messages of OpenAI's chat as templates read them. Raises ApiError."""
    found: list[Message] = []
    names: dict[str, str] = {}
    for index, one in enumerate(given):
        place = f"messages.{index}"
        calls = []
        for number, call in enumerate(one.tool_calls or ()):
            where = f"{place}.tool_calls.{number}.function.arguments"
            calls.append(call_fields(call.function.name, call.function.arguments, call.id, where))
            names[call.id] = call.function.name
        name = one.name or (names.get(one.tool_call_id or "", "") if one.role == "tool" else "")
        reasoning = one.reasoning or one.reasoning_content or ""
        content = text_of(one.content, f"{place}.content")
        found.append(Message(one.role, content, tuple(calls), reasoning, name, one.tool_call_id or ""))
    return found


def chat_tools(given: Sequence[ToolSpec] | None) -> list[Tool]:
    """Tools of OpenAI's chat as templates read them."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in given or ()]


class TokenCounts:
    """Tokens of a request: of its `prompt`, and of its replies as their pieces come."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.made = prompt, 0
        self._cached = 0

    def add(self, piece: Piece) -> None:
        """Count one more piece."""
        self.made += piece.tokens
        self._cached = max(self._cached, piece.cached_tokens)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were in the cache."""
        return min(self._cached, self.prompt)

    def usage(self) -> dict[str, Any]:
        """As OpenAI's chat and completions name them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.made,
            "total_tokens": self.prompt + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """What a token shows, and its bytes, since it may be a part of a character."""
    piece = tokenizer.piece(token, first=False)
    data = (tokenizer.vocabulary[token] or "").encode() if piece is None else piece
    return data.decode("utf-8", "replace"), list(data)


def logprob_number(value: float) -> float:
    """A logarithm that JSON can hold."""
    return round(value, 6) if math.isfinite(value) else LEAST_LOGPROB


def token_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """A token with its probability, as OpenAI's chat writes it."""
    text, data = token_text(tokenizer, token)
    return {"token": text, "logprob": logprob_number(logprob), "bytes": data}


def logprob_entries(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[Mapping[str, Any]]:
    """The tokens of a reply with those that were likeliest at their places."""
    return [
        {
            **token_entry(tokenizer, one.token, one.logprob),
            "top_logprobs": [token_entry(tokenizer, token, value) for token, value in one.top],
        }
        for one in logprobs
    ]
