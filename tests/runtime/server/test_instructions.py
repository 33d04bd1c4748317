"""Test that system and developer messages reach the template where the client put them, in roles that it knows."""

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.chat_prompt import render_chat
from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message
from mycli.runtime.tokenizer.prompt_difference import PromptParts
from tests.support.paths import PICO, ROOT

MESSAGES = (Message("user", "A"), Message("developer", "D"), Message("system", "S"), Message("user", "B"))
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.role }}:{{ m.content }}\n"
    "{% endfor %}"
)


def _rendered(source: str, messages: tuple[Message, ...]) -> str:
    tokenizer = open_model_folder(PICO).tokenizer()
    tokenizer.template = ChatTemplate({"default": source}, {})
    return tokenizer.decode(render_chat(tokenizer, PromptParts(messages)))


def test_a_template_for_developers_gets_their_role() -> None:
    source = (ROOT / "tests/support/templates/instructions_anywhere.jinja").read_text("utf-8")
    text = _rendered(source, MESSAGES)
    order = [text.index(part) for part in ("user\nA", "developer\nD", "system\nS", "user\nB")]
    assert order == sorted(order)


def test_another_template_gets_a_system_message() -> None:
    text = _rendered("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", MESSAGES)
    assert text == "user:A;system:D;system:S;user:B;"


def test_a_template_that_takes_system_messages_first_only_says_so() -> None:
    assert _rendered(FIRST_ONLY, (Message("developer", "D"), Message("user", "B"))) == "system:D\nuser:B\n"
    with pytest.raises(ApiError, match="must be at the beginning"):
        _rendered(FIRST_ONLY, MESSAGES)
