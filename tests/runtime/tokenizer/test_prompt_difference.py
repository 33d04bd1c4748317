"""Test the messages for common causes of cache misses."""

from dataclasses import replace
from typing import Any

import pytest

from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.prompt_difference import Difference, PromptParts, causes


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


MESSAGES = (
    Message("system", "Today is Tuesday, 2026-11-24 07:00. Be brief."),
    Message("user", "What is it?"),
    Message("assistant", "A dog.", reasoning="It barks."),
    Message("user", "And that?"),
)
PARTS = PromptParts(MESSAGES, (tool("a"), tool("b", parameters={"type": "object"})), {"enable_thinking": True})


def said(index: int, **fields: Any) -> PromptParts:
    messages = list(MESSAGES)
    messages[index] = replace(messages[index], **fields)
    return replace(PARTS, messages=messages)


CASES = {
    "nothing": (PARTS, []),
    "continued": (replace(PARTS, messages=(*MESSAGES, Message("assistant", "A cat."))), []),
    "date": (
        said(0, content="Today is Friday, 2026-11-27 18:30. Be brief."),
        ["a date, time or number in the system prompt changed"],
    ),
    "system": (said(0, content="Today is Tuesday. Be rude."), ["the system prompt changed"]),
    "white-space": (said(0, content=MESSAGES[0].content + "\n"), ["the white space of the system prompt changed"]),
    "reasoning": (said(2, reasoning=""), ["the reasoning of message 2 was dropped"]),
    "edited": (said(1, content="Who is it?"), ["message 1 (user) changed"]),
    "removed": (replace(PARTS, messages=(MESSAGES[0], *MESSAGES[2:])), ["messages were removed from message 1 on"]),
    "removed-before-the-last": (
        replace(PARTS, messages=(*MESSAGES[:2], MESSAGES[3])),
        ["messages were removed from message 2 on"],
    ),
    "repeated": (
        replace(PARTS, messages=(MESSAGES[0], *MESSAGES)),
        ["message 1 is of system now, not of user"],
    ),
    "role": (said(1, role="developer"), ["message 1 is of developer now, not of user"]),
    "reasoned-otherwise": (said(2, reasoning="It meows."), ["the reasoning of message 2 was changed"]),
    "calls": (said(2, tool_calls=({"name": "a"},)), ["the calls of message 2 changed"]),
    "name": (said(1, name="Ann"), ["the name or call id of message 1 changed"]),
    "shorter": (replace(PARTS, messages=MESSAGES[:2]), ["the messages from message 2 on are missing"]),
    "shorter-by-one": (replace(PARTS, messages=MESSAGES[:3]), ["the messages from message 3 on are missing"]),
    "reordered": (replace(PARTS, tools=PARTS.tools[::-1]), ["the tools are in another order"]),
    "added": (replace(PARTS, tools=(*PARTS.tools, tool("c"))), ["the tool c was added"]),
    "taken": (replace(PARTS, tools=PARTS.tools[1:]), ["a tool was removed"]),
    "all-taken": (replace(PARTS, tools=()), ["2 tools were removed"]),
    "exchanged": (replace(PARTS, tools=(tool("c"), PARTS.tools[1])), ["a tool was removed", "the tool c was added"]),
    "changed": (replace(PARTS, tools=(tool("a", description="x"), PARTS.tools[1])), ["the tool a changed"]),
    "keys": (
        replace(PARTS, tools=({"function": {"name": "a"}, "type": "function"}, PARTS.tools[1])),
        ["the keys of a tool are in another order"],
    ),
    "argument": (replace(PARTS, arguments={}), ["the template argument enable_thinking changed"]),
}


@pytest.mark.parametrize("name", CASES)
def test_causes_are_named(name: str) -> None:
    second, expected = CASES[name]
    assert causes(PARTS, second) == expected


def test_a_prompt_continues_another_one_that_it_begins_with() -> None:
    assert Difference(7, 7, 9).continues and Difference(7, 7, 9).fields()["continues"]
    assert not Difference(6, 7, 9).continues
