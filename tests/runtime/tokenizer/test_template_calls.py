"""Test that chat templates which leave out or join tool calls get them as the model writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message, with_calls
from mycli.runtime.tokenizer.parsing.tool_formats import (
    HERMES,
    TOOL_FORMATS,
    describe_tools_in_system_message,
    find_tool_format,
    own_tool_format,
)
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser, join_calls
from tests.support.small_tokenizers import SIMPLE, make

# The loops of two published templates that leave out calls.
GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}{# <|tool_call|> #}{% endif %}"
    "{% for message in messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + "
    "'<|end_of_text|>\\n' }}{% endfor %}"
)
LFM = (
    '{%- if tools -%}{{- "List of tools: <|tool_list_start|>[" + tools | tojson + "]<|tool_list_end|>" -}}{%- endif -%}'
    '{%- for message in messages -%}{{- "<|im_start|>" + message["role"] + "\\n" -}}'
    '{%- set content = message["content"] -%}{{- content + "<|im_end|>\\n" -}}{%- endfor -%}'
)


@pytest.mark.parametrize(
    "source, name, end", [(GRANITE, "granite", "<|end_of_text|>"), (LFM, "lfm2", "<|im_end|>")], ids=["granite", "lfm2"]
)
def test_calls_that_a_template_leaves_out_are_written_as_the_model_writes_them(
    source: str, name: str, end: str
) -> None:
    arguments = ({"a": 'x "<y>"', "b": [1, None, True]}, {})
    calls = tuple(
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": values}} for values in arguments
    )
    called = [Message("user", "Hi"), Message("assistant", "Look: ", calls)]
    turns = [[{"role": m.role, **m.fields()} for m in messages] for messages in (called[:1], called)]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = ChatTemplate({"default": source}, {})
    before, after = (template.render([turn], [tools], [{}], False)[0] for turn in turns)
    assert after.startswith(before)
    (tool_format,) = [entry for entry in TOOL_FORMATS if entry.name == name]
    assert find_tool_format(source) is tool_format
    parser = ToolParser(tool_format, tools)
    items = parser.feed(after[len(before) :].removesuffix(f"{end}\n")) + parser.flush()
    assert [json.loads(item.arguments) for item in items if isinstance(item, ToolCall)] == list(arguments)
    assert str(items[0]).endswith("Look:")
    written = source + "{# tool_calls #}"
    assert with_calls(written) == written and with_calls("{{ messages }}") == "{{ messages }}"


def test_a_template_that_joins_texts_gets_arguments_as_text() -> None:
    """That of Functionary 3.2; one that fails for another reason says so."""
    calls = "{% for c in m.tool_calls or [] %}{{ '>' + c.function.arguments }}{% endfor %}"
    joined = f"{{% for m in messages %}}{calls}{{% endfor %}}"
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": "ä"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "B"}]
    assert ChatTemplate({"default": joined}, {}).render([turns, turns[1:]], None, [{}, {}], False) == [
        '>{"a": "ä"}',
        "",
    ]
    with pytest.raises(ModelError, match="TypeError"):
        ChatTemplate({"default": "{{ '>' + messages }}"}, {}).render([turns], None, [{}], False)


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    """Calls of earlier turns are written as the description says, their results as what a user says."""
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    question, results = Message("user", "Hi"), [Message("tool", "3"), Message("tool", "4")]
    called = Message("assistant", "I look.", (call, call))
    first, *others = describe_tools_in_system_message([question, called, *results], tools)
    assert first.role == "system" and '\n{"name": "f", "description": "é"}\n' in first.content
    assert others[0] == question and others[1].role == "assistant"
    parser = ToolParser(HERMES, tools)
    text, *parts = parser.feed(others[1].content) + parser.flush()
    calls = join_calls(part for part in parts if isinstance(part, ToolCall))
    assert text == "I look." and calls == [ToolCall("f", '{"a": "é"}', index) for index in range(2)]
    assert others[2:] == [Message("user", f"<tool_response>\n{text}\n</tool_response>") for text in "34"]
    brief, *rest = describe_tools_in_system_message([Message("system", "Be brief."), question], tools)
    assert brief == Message("system", f"Be brief.\n\n{first.content}") and rest == [question]
    assert describe_tools_in_system_message([], tools) == [first]


def test_the_format_of_a_tokenizer_is_that_of_its_template(tmp_path: Path) -> None:
    assert own_tool_format(make(tmp_path)) is None
    assert own_tool_format(make(tmp_path, SIMPLE + "{% if tools %}<tool_call>{% endif %}")) is HERMES
