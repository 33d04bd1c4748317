"""Test replies that continue the last assistant message: the text equals the uninterrupted reply."""

from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served, joined

QUESTION = {"role": "user", "content": "What is the capital of Japan?"}


@pytest.mark.parametrize("begun", ["The", "The capital of", "The capital of Japan is Tokyo"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_message_is_continued(served: Served, begun: str, stream: bool) -> None:
    whole = joined(served.chat())[0]
    body: dict[str, Any] = {"messages": [QUESTION, {"role": "assistant", "content": begun}], "temperature": 0}
    chat = {**body, "continue_final_message": True, "add_generation_prompt": False, "stream": stream}
    assert begun + joined(served.ask("POST", "/v1/chat/completions", chat))[0] == whole
    if not stream:
        message = served.ask("POST", "/v1/messages", {**body, "max_tokens": 40}).json
        assert begun + message["content"][0]["text"] == whole
        counted = served.ask("POST", "/v1/messages/count_tokens", body).json["input_tokens"]
        usage = message["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_reasoning_before_the_message_stays_reasoning(scripted: Scripted, reasoning: LoadedModel) -> None:
    last = {"role": "assistant", "content": "It is ", "reasoning": "Think <|im_end|>."}
    body = {"model": "pico", "messages": [QUESTION, last], "continue_final_message": True}
    with scripted("Tokyo.", model=reasoning) as served:
        assert joined(served.ask("POST", "/v1/chat/completions", body))[0] == "Tokyo."
        prompt = served.service.worker.engine.prompts[-1]
        text = served.service.loaded.tokenizer.spelled(prompt)
        assert text.endswith("assistant\n<think>\nThink <|im_end|>.\n</think>\n\nIt is ")
        end = reasoning.tokenizer.encode("<|im_end|>", add_special=False, allow_special=True)
        assert prompt.count(end[0]) == 1  # the one after the question: control tokens spelled in a message are text


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [QUESTION], "continue_final_message": True},
        {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
        {"regex": "a+", "continue_final_message": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "continue_final_message": True},
    ],
    ids=["a-question", "alone", "with-a-format", "no-prompt", "both"],
)
def test_what_cannot_be_continued_is_refused(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": [QUESTION, {"role": "assistant", "content": "The"}], **fields}
    answer = served.ask("POST", "/v1/chat/completions", body)
    assert answer.status == 400 and answer.error["param"] in ("messages", "add_generation_prompt"), answer.body
