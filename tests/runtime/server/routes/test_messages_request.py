"""Test what a request in Anthropic's form asks the engine for."""

from typing import Any

import pytest
from pydantic import ValidationError

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.routes.chat_spec import ChatSpec
from mycli.runtime.server.routes.messages_request import (
    CountRequest,
    MessagesRequest,
    chat_spec,
    counted_spec,
    edit_context,
)

ASK = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Well,"}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "integer"}}


def spec(*messages: Any, **fields: Any) -> ChatSpec:
    return chat_spec(MessagesRequest.model_validate({"messages": list(messages) or [ASK], "max_tokens": 9, **fields}))


def counted(*messages: Any, **fields: Any) -> ChatSpec:
    return counted_spec(CountRequest.model_validate({"messages": list(messages) or [ASK], **fields}))


@pytest.mark.parametrize(
    ("choice", "kind", "named"),
    [
        (None, "auto", None),
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "look"}, "required", "look"),
        ({"type": "auto", "name": "look"}, "auto", None),
    ],
)
def test_the_choice_of_a_tool(choice: Any, kind: str, named: str | None) -> None:
    asked = spec(tools=[TOOL], tool_choice=choice)
    assert (asked.choice, asked.named, asked.parallel, len(asked.tools)) == (kind, named, True, 1)
    assert counted(tools=[TOOL], tool_choice=choice).choice == ("none" if kind == "none" else "auto")


def test_calls_one_at_a_time_and_strict_tools() -> None:
    asked = spec(
        tools=[TOOL, {**TOOL, "name": "exact", "strict": True}, {"type": "bash_1", "name": "bash"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert not asked.parallel and list(asked.strict) == ["exact"] and list(asked.omitted_tools) == ["bash_1"]
    assert [tool["function"]["name"] for tool in asked.tools] == ["look", "exact"]
    with pytest.raises(ApiError, match="tool_choice.name: is required"):
        spec(tool_choice={"type": "tool"})


def test_tools_are_described_to_the_model() -> None:
    tools = [{**TOOL, "description": "Looks."}, {**TOOL, "name": "wait", "type": "custom"}, {"type": "bash_1"}]
    for asked in (spec, counted):
        looks, waits = (tool["function"] for tool in asked(tools=tools).tools)
        assert looks == {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}
        assert waits == {"name": "wait", "parameters": TOOL["input_schema"]} and not asked().tools
    for tool, words in (
        ({"name": "look"}, "input_schema is required"),
        ({"input_schema": {}}, "name is required"),
        ({}, "name is required"),
    ):
        with pytest.raises(ValidationError, match=words):
            spec(tools=[tool])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_tokens", 1, 1 << 31),
        ("top_k", 0, 1 << 31),
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("deadline", 0.1, 86400),
        ("thinking", 0, 1 << 31),
    ],
)
def test_numbers_end_at_their_limits(name: str, low: float, high: float) -> None:
    def read(value: float) -> MessagesRequest:
        field = {"type": "enabled", "budget_tokens": value} if name == "thinking" else value
        return MessagesRequest.model_validate({"messages": [ASK], "max_tokens": 9, name: field})

    for value in (low, high):
        read(value)
    step = 1 if high == 1 << 31 else 0.01
    for value in (low - step, high + step):
        with pytest.raises(ValidationError, match=name):
            read(value)


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, True),
        ({"type": "enabled"}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
    ],
)
def test_reasoning_is_shown_unless_a_request_omits_it(thinking: Any, shown: bool) -> None:
    body = MessagesRequest.model_validate({"messages": [ASK], "max_tokens": 9, "thinking": thinking})
    assert body.shows_reasoning == shown


@pytest.mark.parametrize(
    ("messages", "continued"),
    [
        ((ASK,), False),
        ((ASK, BEGUN), True),
        ((BEGUN,), False),
        ((ASK, BEGUN, ASK), False),
        ((ASK, {"role": "assistant", "content": [CALL]}), False),
    ],
    ids=["user", "assistant", "assistant-alone", "user-last", "call"],
)
def test_a_last_message_of_the_assistant_is_continued(messages: Any, continued: bool) -> None:
    assert spec(*messages).continued == counted(*messages).continued == continued


def test_blocks_become_messages() -> None:
    blocks = [
        {"type": "thinking", "thinking": "It is "},
        {"type": "thinking", "thinking": "near."},
        {"type": "web_search_tool_result"},
        {"type": "text", "text": "I look."},
        CALL,
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "A dog."},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "And?"},
    ]
    empty = {"role": "assistant", "content": []}
    asked = spec(ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}, empty, ASK)
    assert [message.role for message in asked.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "assistant",
        "user",
    ]
    _, said, first, second, more, nothing, _ = asked.messages
    assert (said.content, said.reasoning) == ("I look.", "It is near.")
    assert said.tool_calls[0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert (first.name, first.content, first.tool_call_id) == (
        "look",
        "A dog.",
        "a",
    ) and second.name == second.content == ""
    assert more.content == "And?" and nothing.content == "" and list(asked.omitted) == ["block web_search_tool_result"]
    only = {"role": "user", "content": [results[0]]}
    assert [message.role for message in spec(ASK, only).messages] == ["user", "tool"], "no empty message after a result"
    assert spec(system="Be brief.").messages[0].content == "Be brief."


def test_the_billing_header_of_claude_code_is_left_out() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
    brief = {"type": "text", "text": "Be brief."}
    for system in ([{"type": "text", "text": header}, brief], f"{header}\nBe brief."):
        assert spec(system=system).messages[0].content == "Be brief."
        assert counted(system=system).messages[0].content == "Be brief."
    quoted = f"Clients send {header}"
    assert spec(system=quoted).messages[0].content == quoted


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "boom", "is_error": True}, "Error: boom"),
        ({"is_error": True}, "Error: "),
        ({"content": [{"type": "text", "text": "error: no file"}], "is_error": True}, "error: no file"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": [{"type": "tool_reference", "tool_name": "look"}]}, "look"),
    ],
)
def test_results_of_tools_are_text(result: Any, text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "a", **result}
    assert spec({"role": "user", "content": [block]}).messages[0].content == text


def test_blocks_that_only_anthropic_can_read_are_left_out() -> None:
    error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    found = {"type": "tool_search_tool_search_result", "tool_references": []}
    blocks = [
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": error},
        {"type": "tool_search_tool_result", "tool_use_id": "b", "content": found},
        {"type": "fallback", "to": {"model": "other"}},
    ]
    summary = {"type": "compaction", "content": "They met."}
    asked = spec({"role": "assistant", "content": [*blocks, summary]}, ASK)
    assert list(asked.omitted) == [f"block {block['type']}" for block in blocks]
    assert [message.content for message in asked.messages] == ["They met.", "Hi"]
    for kind in ("tool_result", "search_result", "compaction"):
        with pytest.raises(ApiError, match="content: must be a string or a list"):
            spec({"role": "user", "content": [{"type": kind, "content": {}}]})


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "data": "A."}, "title": "T", "context": "C"}, "T\nC\nA."),
        ({"type": "document", "source": {"type": "content", "content": "A."}}, "A."),
        (
            {"type": "search_result", "source": "url", "title": "T", "content": [{"type": "text", "text": "A."}]},
            "T\nurl\nA.",
        ),
        ({"type": "document", "source": {"type": "text"}}, ""),
        ({"type": "search_result", "source": {"type": "text", "data": "B."}, "content": "A."}, "A."),
        ({"type": "search_result"}, ""),
        ({"type": "compaction"}, ""),
        ({"type": "tool_reference"}, ""),
    ],
    ids=["text", "content", "search", "no-text", "no-address", "nothing", "no-summary", "no-name"],
)
def test_documents_are_text(block: Any, text: str) -> None:
    assert spec({"role": "user", "content": [block]}).messages[0].content == text


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "data": "AA"}},
        {"type": "document", "source": {"type": "base64", "data": "QQ=="}},
    ],
    ids=["image", "document"],
)
def test_what_is_no_text_in_a_result_is_left_out_and_named(block: Any) -> None:
    text = {"type": "text", "text": "A dog."}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, block]}
    asked = spec({"role": "user", "content": [result]})
    note = f"[{block['type']}: left out, this model reads text only]"
    assert asked.messages[0].content == f"A dog.\n{note}" and list(asked.omitted) == [f"block {block['type']}"]


def test_a_result_with_an_unreadable_part_is_refused() -> None:
    part = {"type": "search_result", "content": [{"type": "text"}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    with pytest.raises(ApiError, match="text: is required"):
        spec({"role": "user", "content": [result]})


@pytest.mark.parametrize("source", [{"type": "base64", "data": "QQ=="}, {"type": "url"}, None])
def test_documents_that_are_no_text_are_refused(source: Any) -> None:
    with pytest.raises(ApiError, match=r"messages.0.content.0.source.type: .* is not supported"):
        spec({"role": "user", "content": [{"type": "document", "source": source}]})


def thinks(text: str, *blocks: Any) -> Any:
    said = {"type": "text", "text": "Hm."}
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text}, said, *blocks]}


def clears_thinking(keep: Any) -> dict[str, Any]:
    return {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}


@pytest.mark.parametrize(
    ("keep", "reasoning"),
    [
        ("all", ["one", "two", "three", "four"]),
        ({"type": "all"}, ["one", "two", "three", "four"]),
        ({"type": "thinking_turns", "value": 2}, ["", "two", "three", "four"]),
        ({"type": "thinking_turns", "value": 1}, ["", "", "", "four"]),
        (None, ["", "", "", "four"]),
    ],
    ids=["all", "all-turns", "two", "one", "default"],
)
def test_the_reasoning_of_older_turns_is_left_out(keep: Any, reasoning: list[str]) -> None:
    """Claude Code asks for it after an hour without a request."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": "A dog."}
    reminder = {"type": "text", "text": "Be brief."}
    messages = [ASK, thinks("one"), ASK, thinks("two", CALL), {"role": "user", "content": [result, reminder]}]
    edited = {"context_management": {"edits": [clears_thinking(keep)]}}
    for asked in (spec, counted):
        found = asked(*messages, thinks("three"), ASK, thinks("four"), ASK, **edited)
        assert [message.reasoning for message in found.messages if message.role == "assistant"] == reasoning


def test_of_several_edits_of_reasoning_the_strictest_counts() -> None:
    edits = [clears_thinking(keep) for keep in ({"type": "thinking_turns", "value": 3}, None, "all")]
    for several in (edits, edits[::-1]):
        asked = spec(ASK, thinks("one"), ASK, thinks("two"), ASK, context_management={"edits": several})
        assert [message.reasoning for message in asked.messages if message.role == "assistant"] == ["", "two"]


def test_a_summary_of_a_conversation_is_left_out_and_named() -> None:
    edited = spec(context_management={"edits": [{"type": "compact_20260112"}]})
    assert edited.messages == spec().messages and edited.omitted == ["edit compact_20260112"]
    with pytest.raises(ValidationError):
        spec(context_management={"edits": [{"type": "clear_everything"}]})


def test_options_of_the_reply() -> None:
    asked = spec(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        deadline=3,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 5},
    )
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 7)
    assert list(asked.sampling.stops) == ["END"] and (asked.limit, asked.clipped, asked.thinking_budget) == (9, True, 5)
    assert asked.arguments == {"enable_thinking": True}
    assert spec(thinking={"type": "disabled"}).arguments == {"enable_thinking": False} and spec().arguments == {}
    low = spec(output_config={"effort": "low"}, chat_template_kwargs={"enable_thinking": False})
    assert low.arguments == {"reasoning_effort": "low", "enable_thinking": False} and low.thinking_budget is None


def test_a_format_in_either_form_and_not_in_both() -> None:
    assert spec().format is None and spec(output_config={"effort": "low"}).format is None
    for fields in ({"output_config": {"format": SCHEMA}}, {"output_format": SCHEMA}):
        found = spec(**fields).format
        assert found is not None and found.type == "json_schema"
    with pytest.raises(ApiError, match="cannot be combined"):
        spec(output_config={"format": SCHEMA}, output_format=SCHEMA)


def test_cleared_reasoning_is_counted_by_what_the_prompt_saves() -> None:
    think = {"type": "thinking", "thinking": "x" * 30, "signature": ""}
    said = {"role": "assistant", "content": [think, {"type": "text", "text": "Yes."}]}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}
    messages = [ASK, said, ASK, said, ASK]
    body = MessagesRequest.model_validate({"messages": messages, "max_tokens": 9, "context_management": edits})

    def characters(spec: ChatSpec) -> int:
        return sum(len(str(message.fields())) for message in spec.messages)

    edited, (applied,) = edit_context(body, chat_spec(body), characters)
    whole = spec(*messages)
    assert edit_context(body, chat_spec(body), lambda spec: -characters(spec))[1][0]["cleared_input_tokens"] == 0
    assert applied["cleared_thinking_turns"] == 1
    assert applied["cleared_input_tokens"] == characters(whole) - characters(edited) >= 30


def test_cleared_tool_uses_are_described_where_they_shorten_the_prompt() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "A dog. " * 30}
    messages = [ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 0}}
    for kept, cleared in ((0, 1), (1, 0)):
        edits = {"edits": [{**edit, "keep": {"type": "tool_uses", "value": kept}}]}
        asked = {"messages": messages, "max_tokens": 9, "context_management": edits}
        body = MessagesRequest.model_validate(asked)
        edited, applied = edit_context(
            body, chat_spec(body), lambda spec: sum(len(message.content) for message in spec.messages)
        )
        assert [entry["cleared_tool_uses"] for entry in applied] == [cleared] * cleared
        assert (edited.messages == chat_spec(body).messages) == (not cleared)


def test_a_turn_with_results_of_tools_is_counted_once() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "A dog."}
    messages = [ASK, thinks("one", CALL), {"role": "user", "content": [result]}, thinks("two"), ASK, thinks("three")]
    for kept, reasoning in ((1, ["", "", "three"]), (2, ["one", "two", "three"])):
        edits = {"edits": [clears_thinking({"type": "thinking_turns", "value": kept})]}
        body = MessagesRequest.model_validate({"messages": messages, "max_tokens": 9, "context_management": edits})
        asked, applied = edit_context(body, chat_spec(body), lambda spec: 1)
        assert [message.reasoning for message in asked.messages if message.role == "assistant"] == reasoning
        assert [entry["cleared_thinking_turns"] for entry in applied] == [1] * (2 - kept)
