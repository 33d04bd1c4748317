"""Test how messages of chat requests are read, and how tokens of several replies are counted."""

from typing import Any

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.schemas import ChatMessage
from mycli.runtime.server.routes.wire import chat_messages


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "Think.", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Think."}], "closed": True},
        {"type": "reasoning", "reasoning": "Think."},
        {"type": "reasoning", "text": "Think."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Think."}]},
    ],
    ids=["anthropic", "mistral", "langchain", "ai-sdk", "responses"],
)
def test_parts_of_reasoning_are_the_reasoning_of_the_assistant(thought: dict[str, Any]) -> None:
    parts = [thought, {"type": "redacted_thinking", "data": "eA=="}, {"type": "text", "text": "Four."}]
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": parts}]
    _, reply = chat_messages([ChatMessage.model_validate(message) for message in talk])
    assert (reply.content, reply.reasoning) == ("Four.", "Think.")
    with pytest.raises(ApiError, match="is not supported"):
        chat_messages([ChatMessage.model_validate({"role": "user", "content": parts})])
