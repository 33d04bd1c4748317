"""Test how messages, calls and tools of OpenAI's chat become those of chat templates."""

from typing import Any

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.schemas import ChatMessage, ToolSpec
from mycli.runtime.server.routes.wire import chat_messages, chat_tools, strict_tools
from mycli.runtime.tokenizer.chat_template import Message

IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
TEXT = {"type": "text", "text": "a"}


def read(*items: dict[str, Any]) -> list[Message]:
    return chat_messages([ChatMessage.model_validate(item) for item in items])


def calls(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(entries), **fields}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([TEXT, {"type": "input_text", "text": "b"}], "a\nb"),
        (["a", "b"], "a\nb"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
        ([{"type": "refusal", "text": "a", "refusal": "No."}], "a"),
    ],
)
def test_the_text_of_a_message_is_that_of_its_parts(content: Any, text: str) -> None:
    for role in ("user", "assistant", "tool"):
        assert read({"role": role, "content": content})[0].content == text


def test_parts_without_text_are_refused_except_in_results_of_tools() -> None:
    for content, place in (([TEXT, IMAGE], "1.type"), ([{"type": "text"}], "0.text")):
        with pytest.raises(ApiError) as error:
            read({"role": "user", "content": content})
        assert (error.value.status, error.value.param) == (400, f"messages.0.content.{place}")
    (result,) = read({"role": "tool", "content": [TEXT, IMAGE]})
    assert result.content == "a\n[image_url: left out, this model reads text only]"


def test_a_refusal_is_the_text_of_a_message_without_another() -> None:
    for content, text in ((None, "No."), ("Yes.", "Yes.")):
        assert read({"role": "assistant", "content": content, "refusal": "No."})[0].content == text


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ({}, {}),
        (None, {}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_arguments_of_a_call_are_an_object(arguments: Any, values: dict[str, Any]) -> None:
    (message,) = read(calls({"id": "c", "function": {"name": "look", "arguments": arguments}}))
    assert message.tool_calls == ({"type": "function", "id": "c", "function": {"name": "look", "arguments": values}},)


def test_calls_of_custom_tools_and_of_the_older_form_are_calls_of_functions() -> None:
    custom = {"type": "custom", "custom": {"name": "patch", "input": "x"}}
    (message,) = read(calls(custom, function_call={"name": "look", "arguments": "{}"}))
    assert message.tool_calls == (
        {"type": "function", "id": "", "function": {"name": "patch", "arguments": {"input": "x"}}},
        {"type": "function", "id": "", "function": {"name": "look", "arguments": {}}},
    )


@pytest.mark.parametrize(
    ("item", "role", "name", "call"),
    [
        ({"role": "tool", "tool_call_id": "c"}, "tool", "look", "c"),
        ({"role": "tool", "tool_call_id": "c", "name": "other"}, "tool", "other", "c"),
        ({"role": "tool", "tool_call_id": "d"}, "tool", "", "d"),
        ({"role": "tool"}, "tool", "patch", ""),  # the call without an id
        ({"role": "function", "name": "look"}, "tool", "look", ""),
        ({"role": "user", "tool_call_id": "c"}, "user", "", "c"),
    ],
)
def test_the_result_of_a_call_has_its_name(item: dict[str, Any], role: str, name: str, call: str) -> None:
    entries = [{"id": "c", "function": {"name": "look"}}, {"function": {"name": "patch"}}]
    _, result = read(calls(*entries), {**item, "content": "4"})
    assert (result.role, result.name, result.tool_call_id, result.content) == (role, name, call, "4")


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, "c"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
    ],
)
def test_reasoning_is_read_from_the_field_that_has_it(fields: dict[str, str], reasoning: str) -> None:
    content = [{"type": "thinking", "thinking": "c"}, TEXT]
    (message,) = read({"role": "assistant", "content": content, **fields})
    assert (message.reasoning, message.content) == (reasoning, "a")


def test_functions_are_tools_and_other_types_are_named() -> None:
    functions = [{"name": "look", "strict": True}, {"name": "read", "strict": False}, {"name": "write"}]
    entries = [*({"type": "function", "function": function} for function in functions), {"type": "web_search"}]
    tools = [ToolSpec.model_validate(entry) for entry in entries]
    offered, omitted = chat_tools(tools)
    assert [tool["function"]["name"] for tool in offered] == ["look", "read", "write"] and omitted == ["web_search"]
    assert not any("strict" in tool["function"] for tool in offered) and strict_tools(tools) == ["look"]
    assert chat_tools(None) == ([], []) and strict_tools(None) == []
