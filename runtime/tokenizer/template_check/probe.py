"""Renders planted conversations; all of their texts are words that occur in no template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message, takes_tools
from mycli.runtime.tokenizer.parsing.tool_formats import ToolFormat, model_tool_format
from mycli.runtime.tokenizer.tokenizer import Tokenizer

SYSTEM, THOUGHT, RESULT = "Sound like a quokka.", "Ibises wade here.", "Seven grebes."
PLANTED_QUESTIONS = ("Where are the herons?", "And the avocets?", "And the bitterns?")
PLANTED_ANSWERS = ("By the weir.", "On the mudflat.", "In the reeds.")
# Quotes, markup and a letter outside ASCII: all must survive being written as JSON and read back.
ARGUMENTS: Mapping[str, Any] = {"lake": 'Lake "Ä" <1>', "count": 3}
FUNCTION = "find_herons"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "Finds herons at a lake.",
        "parameters": {
            "type": "object",
            "properties": {
                "lake": {"type": "string", "description": "The name of the lake."},
                "count": {"type": "integer"},
            },
            "required": ["lake"],
        },
    },
}


def user(index: int) -> Message:
    return Message("user", PLANTED_QUESTIONS[index])


def assistant(index: int, reasoning: str = "") -> Message:
    return Message("assistant", PLANTED_ANSWERS[index], (), reasoning)


def calling(calls: int, reasoning: str = "", call_id: str = "heron0000") -> Message:
    """Return a message of `calls` tool calls. The id has nine letters and digits, as Mistral requires."""
    tool_calls = tuple(
        {
            "type": "function",
            "id": call_id[:-1] + str(number),
            "function": {"name": FUNCTION, "arguments": {**ARGUMENTS, "count": ARGUMENTS["count"] + number}},
        }
        for number in range(calls)
    )
    return Message("assistant", "", tool_calls, reasoning)


def result(call_id: str = "heron0000") -> Message:
    """Return the result of the first call of a message."""
    return Message("tool", RESULT, name=FUNCTION, tool_call_id=call_id[:-1] + "0")


@dataclass(frozen=True)
class Probe:
    """A template with its arguments; the tokenizer and the stop ids of its model, if it belongs to one."""

    template: ChatTemplate
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    stop_ids: frozenset[int] = frozenset()

    def text(self, messages: Sequence[Message], *, more: bool = False, tools: bool = False) -> str:
        """Return the rendered conversation; `more`: with the generation prompt. Raises what the template raises."""
        conversation = [{"role": message.role, **message.fields()} for message in messages]
        return self.template.render([conversation], [[TOOL]] if tools else None, [self.arguments], more)[0]

    @property
    def has_tools(self) -> bool:
        return takes_tools(self.template.source(tools=True))

    @property
    def tool_format(self) -> ToolFormat | None:
        declared = None if self.tokenizer is None else self.tokenizer.response_template
        return model_tool_format(declared, self.template.source(tools=True))

    @property
    def has_reasoning(self) -> bool:
        source = self.template.source(tools=True)
        return "reasoning_content" in source or "<think>" in source
