"""Test which tool results and inputs an edit leaves out of a conversation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from mycli.runtime.server.routes.context_edits import (
    InputTokens,
    ThinkingEdit,
    ToolUses,
    ToolUsesEdit,
    clear_tool_uses,
)
from mycli.runtime.tokenizer.chat_template import Message

RESULT = "a long result " * 9


def conversation(*tools: str) -> list[Message]:
    messages = [Message("user", "Hi")]
    for index, tool in enumerate(tools):
        function = {"name": tool, "arguments": {"at": index}}
        messages.append(Message("assistant", "", ({"type": "function", "id": f"c{index}", "function": function},)))
        messages.append(Message("tool", RESULT, name=tool, tool_call_id=f"c{index}"))
    return messages


def count(messages: Sequence[Message]) -> int:
    return sum(len(message.content) + len(str(message.tool_calls)) for message in messages)


def edited(*tools: str, **settings: Any) -> tuple[list[bool], list[Any], Any]:
    """Return which results are whole, the inputs of the calls, and the description of the edit."""
    edit = ToolUsesEdit.model_validate({"type": "clear_tool_uses_20250919", **settings})
    before = conversation(*tools)
    after, description = clear_tool_uses(before, edit, count)
    if description is None:
        assert after == before
    else:
        assert description["cleared_input_tokens"] == count(before) - count(after) > 0
    results = [message.content == RESULT for message in after if message.role == "tool"]
    inputs = [call["function"]["arguments"] for message in after for call in message.tool_calls]
    return results, inputs, description


def turns(keep: Any) -> int | None:
    return ThinkingEdit.model_validate({"type": "clear_thinking_20251015", "keep": keep}).turns


def test_a_number_of_turns_keeps_its_reasoning() -> None:
    assert [turns(keep) for keep in ("all", {"type": "all"}, {"type": "all", "value": 3})] == [None] * 3
    assert turns({"type": "thinking_turns"}) == 1 == ThinkingEdit(type="clear_thinking_20251015").turns
    for value in (1, 1 << 14):
        assert turns({"type": "thinking_turns", "value": value}) == value
    for value in (0, (1 << 14) + 1):
        with pytest.raises(ValidationError, match="value"):
            turns({"type": "thinking_turns", "value": value})


@pytest.mark.parametrize("kind", [InputTokens, ToolUses])
def test_numbers_of_tokens_and_calls_end_at_their_limits(kind: type[InputTokens | ToolUses]) -> None:
    name = "input_tokens" if kind is InputTokens else "tool_uses"
    for value in (0, 1 << 31):
        assert kind.model_validate({"type": name, "value": value}).value == value
    for value in (-1, (1 << 31) + 1):
        with pytest.raises(ValidationError, match="value"):
            kind.model_validate({"type": name, "value": value})


SMALL = {"type": "input_tokens", "value": 100}
ONE = {"type": "tool_uses", "value": 1}


def test_the_last_results_are_kept() -> None:
    results, inputs, description = edited(*"abcde", trigger=SMALL)
    assert results == [False, False, True, True, True] and inputs == [{"at": index} for index in range(5)]
    assert (description["type"], description["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 2)
    assert edited(*"abc", trigger=SMALL, keep={"type": "tool_uses", "value": 0})[0] == [False] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {},  # 100,000 tokens
        {"trigger": {"type": "tool_uses", "value": 5}},
        {"trigger": SMALL, "keep": {"type": "tool_uses", "value": 5}},
        {"trigger": SMALL, "clear_at_least": {"type": "input_tokens", "value": 5000}},
        {"trigger": SMALL, "exclude_tools": ["a", "b"]},
    ],
)
def test_nothing_is_cleared_below_a_limit(settings: Any) -> None:
    assert edited(*"abcde", **settings)[::2] == ([True] * 5, None)


def test_limits_are_exact() -> None:
    tokens, saved = count(conversation(*"ab")), edited(*"ab", trigger=SMALL, keep=ONE)[2]["cleared_input_tokens"]
    for trigger, least, clears in ((tokens - 1, saved, True), (tokens, saved, False), (tokens - 1, saved + 1, False)):
        settings = {
            "trigger": {"type": "input_tokens", "value": trigger},
            "clear_at_least": {"type": "input_tokens", "value": least},
        }
        assert (edited(*"ab", keep=ONE, **settings)[2] is not None) == clears


def test_a_result_shorter_than_the_note_that_replaces_it_stays() -> None:
    edit = ToolUsesEdit.model_validate({"type": "clear_tool_uses_20250919", "trigger": SMALL, "keep": ONE})
    short = [
        replace(message, content="42") if message.tool_call_id == "c0" else message for message in conversation(*"ab")
    ]
    assert clear_tool_uses(short, edit, count) == (short, None)


def test_an_edit_saves_at_least_a_token() -> None:
    edit = ToolUsesEdit.model_validate({"type": "clear_tool_uses_20250919", "trigger": SMALL, "keep": ONE})
    note = clear_tool_uses(conversation(*"ab"), edit, count)[0][2].content
    for saved, applies in ((0, False), (1, True)):
        messages = conversation(*"ab")
        messages[2] = replace(messages[2], content="x" * (len(note) + saved))
        _, description = clear_tool_uses(messages, edit, count)
        assert (description is not None) == applies


def test_a_number_of_calls_may_be_the_limit() -> None:
    assert edited(*"abcde", trigger={"type": "tool_uses", "value": 4}, keep=ONE)[0] == [False] * 4 + [True]


def test_tools_may_be_excluded() -> None:
    assert edited(*"abab", trigger=SMALL, keep=ONE, exclude_tools=["a"])[0] == [True, False, True, True]


@pytest.mark.parametrize("tools, cleared", [(True, [0, 1]), (["b"], [1]), (False, [])])
def test_inputs_are_cleared_where_they_are_named(tools: Any, cleared: list[int]) -> None:
    _, inputs, _ = edited(*"aba", trigger=SMALL, keep=ONE, clear_tool_inputs=tools)
    assert inputs == [{} if index in cleared else {"at": index} for index in range(3)]


def test_a_call_without_a_result_is_not_counted_as_cleared() -> None:
    edit = ToolUsesEdit.model_validate({"type": "clear_tool_uses_20250919", "trigger": SMALL, "keep": ONE})
    messages = [message for message in conversation("a", "b", "c") if message.tool_call_id != "c0"]
    _, description = clear_tool_uses(messages, edit, count)
    assert description is not None and description["cleared_tool_uses"] == 1
