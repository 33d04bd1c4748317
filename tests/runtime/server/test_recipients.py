"""Test replies whose prompt ends with the mark before a recipient (Functionary 3.2)."""

import copy
import dataclasses

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.tokenizer.chat_template import ChatTemplate
from tests.runtime.server.conftest import Scripted
from tests.support.served import joined

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}

# As in the template of Functionary 3.2, which joins texts.
FUNCTIONARY = (
    "Respond in this format: >>>${recipient}\n{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
    "{{ '>>>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n>>>{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("all\nFour.", "Four.", []),
        ("all", "all", []),
        ('{"a": 4}', '{"a": 4}', []),
        ('f\n{"a": 1}>>>f\n{"a": 2}', "", [("f", '{"a": 1}'), ("f", '{"a": 2}')]),
        ('all\nLook.\n>>>f\n{"a": 1}', "Look.", [("f", '{"a": 1}')]),
    ],
    ids=["text", "word", "format", "calls", "both"],
)
def test_the_recipients_of_functionary(
    scripted: Scripted, loaded: LoadedModel, text: str, content: str, calls: list[tuple[str, str]], stream: bool
) -> None:
    template = ChatTemplate({"default": FUNCTIONARY}, {})
    tokenizer = copy.copy(loaded.tokenizer)
    tokenizer.template = template
    with scripted(text, model=dataclasses.replace(loaded, tokenizer=tokenizer)) as served:
        end = "tool_calls" if calls else "stop"
        assert joined(served.chat("Go", tools=[TOOL], stream=stream)) == (content, "", calls, end)
        if not calls:
            assert joined(served.chat("Go", stream=stream)) == (content, "", [], "stop")
        written = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
        turns = [{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [written]}]
        prompt = served.ask("POST", "/apply-template", {"messages": turns, "tools": [TOOL]}).json["prompt"]
        assert '>>>f\n{"a": 1}' in prompt
