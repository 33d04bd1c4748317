"""Test how long a reply of the Python interface may be if the caller sets no limit."""

import pytest

from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.open import open_model


@pytest.mark.parametrize(("context", "limit"), [(1024, 512), (256, None)])
def test_a_reply_without_a_limit_has_512_tokens_or_what_the_context_has_room_for(
    context: int, limit: int | None
) -> None:
    # None: only the context ends the reply; a limit that it has no room for would refuse the prompt.
    with open_model("pico", EngineConfig(device="cpu", context=context), offline=True) as opened:
        assert opened.stream("Tell me a story.").request.limit == limit
        assert opened.stream("Tell me a story.", max_tokens=5).request.limit == 5


def test_a_chat_of_one_question_is_a_prompt() -> None:
    question = "What is the capital of Japan?"
    with open_model("pico", EngineConfig(device="cpu", context=256), offline=True) as opened:
        completion = opened.chat([{"role": "user", "content": question}], max_tokens=8)
        assert completion.text and completion.text == opened.generate(question, max_tokens=8).text
