"""Test how messages of chat requests are read, and how tokens of several replies are counted."""

from typing import Any

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.schemas import ChatMessage
from mycli.runtime.server.routes.wire import chat_messages
from tests.support.served import Served

_USAGE = {"include_usage": True}


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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_cached_tokens_of_several_prompts_are_added(served: Served, stream: bool) -> None:
    prompts = ["One " * 40, "Two " * 60]

    def cached(prompt: Any, **fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "stream": stream, **fields}
        answer = served.ask("POST", "/v1/completions", body | ({"stream_options": _USAGE} if stream else {}))
        usage = (answer.events[-1] if stream else answer.json)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached(prompts)
    alone = [cached(prompt) for prompt in prompts]
    assert min(alone) > 16 and cached(prompts) == cached(prompts, n=2) == sum(alone)
