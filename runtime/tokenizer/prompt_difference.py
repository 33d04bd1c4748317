"""Explains why a prompt cannot reuse the cache of an earlier one: where the two differ first, and the cause.

Causes are found by comparing the parts of both prompts: tools, template arguments and messages.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycli.runtime.tokenizer.chat_template import Message, Tool

AROUND = 60  # characters shown before and after the first difference
# Dates, times and long numbers, such as a counter or a time in seconds.
_DATED = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?|\b\d{1,2}:\d\d(?::\d\d)?\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b\d{9,}\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:, \d{4})?\b"
)


@dataclass(frozen=True)
class PromptParts:
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The first difference of two prompts.

    tokens: number of shared tokens; first, second: lengths in tokens; before: the end of the shared text; earlier,
    later: the text of each prompt after it; causes: in words, the likeliest first; empty if the second continues the
    first.
    """

    tokens: int
    first: int
    second: int
    before: str = ""
    earlier: str = ""
    later: str = ""
    causes: Sequence[str] = ()

    @property
    def continues(self) -> bool:
        """Whether the whole first prompt is the beginning of the second."""
        return self.tokens == self.first

    def fields(self) -> dict[str, Any]:
        """Return the difference as an object."""
        return {
            "shared_tokens": self.tokens,
            "first_tokens": self.first,
            "second_tokens": self.second,
            "continues": self.continues,
            "before": self.before,
            "earlier": self.earlier,
            "later": self.later,
            "causes": list(self.causes),
        }


def causes(first: PromptParts, second: PromptParts) -> list[str]:
    """Return the differences of two prompts in words, in the order in which templates render the parts."""
    changes = [
        f"the template argument {name} changed"
        for name in sorted({*first.arguments, *second.arguments})
        if first.arguments.get(name) != second.arguments.get(name)
    ]
    changes += _tool_causes(first.tools, second.tools)
    changes += _message_causes(first.messages, second.messages)
    return changes


def _tool_causes(first: Sequence[Tool], second: Sequence[Tool]) -> list[str]:
    if [json.dumps(tool) for tool in first] == [json.dumps(tool) for tool in second]:
        return []
    before, after = ({_name(tool): tool for tool in tools} for tools in (first, second))
    # A removed tool may be another client's, so it is not named.
    removed = sum(name not in after for name in before)
    changes = ["a tool was removed" if removed == 1 else f"{removed} tools were removed"] if removed else []
    changes += [f"the tool {name} was added" for name in after if name not in before]
    same = [name for name in before if name in after]
    changes += [f"the tool {name} changed" for name in same if before[name] != after[name]]
    if not changes and list(before) != list(after):
        changes.append("the tools are in another order")
    return changes or ["the keys of a tool are in another order"]


def _name(tool: Tool) -> str:
    return str(tool.get("function", {}).get("name", ""))


def _message_causes(first: Sequence[Message], second: Sequence[Message]) -> list[str]:
    removed = len(first) - len(second)
    for index, (before, after) in enumerate(zip(first, second, strict=False)):
        if before == after:
            continue
        if removed > 0 and list(second[index:]) == list(first[index + removed :]):
            return [f"messages were removed from message {index} on"]
        return [_message_cause(index, before, after)]
    if removed > 0:
        return [f"the messages from message {len(second)} on are missing"]
    return []


def _message_cause(index: int, before: Message, after: Message) -> str:
    what = "the system prompt" if before.role in ("system", "developer") else f"message {index} ({before.role})"
    if before.role != after.role:
        return f"message {index} is of {after.role} now, not of {before.role}"
    if before.content != after.content:
        if _DATED.sub("", before.content) == _DATED.sub("", after.content):
            return f"a date, time or number in {what} changed"
        if before.content.split() == after.content.split():
            return f"the white space of {what} changed"
        return f"{what} changed"
    if before.reasoning != after.reasoning:
        return f"the reasoning of message {index} was {'changed' if after.reasoning else 'dropped'}"
    if before.tool_calls != after.tool_calls:
        return f"the calls of message {index} changed"
    return f"the name or call id of message {index} changed"
