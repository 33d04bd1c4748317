"""Anthropic's edits of a conversation before the model reads it: old reasoning, old tool results and their calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from mycli.runtime.server.requests.schemas import MAX_TOOLS, Name, Strict
from mycli.runtime.tokenizer.chat_template import Message

_CLEARED = "[This tool result was cleared to shorten the conversation.]"
_MOST = 1 << 31


class ThinkingTurns(Strict):
    """The number of turns whose reasoning is kept; `all` has no value."""

    type: Literal["thinking_turns", "all"]
    value: int = Field(1, ge=1, le=1 << 14)


class ThinkingEdit(Strict):
    """Leaves out the reasoning of older turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns = ThinkingTurns(type="thinking_turns", value=1)

    @property
    def turns(self) -> int | None:
        """Return the number of turns, from the last one, that keep their reasoning; None for all."""
        return None if self.keep == "all" or self.keep.type == "all" else self.keep.value


class InputTokens(Strict):
    """A number of tokens of the prompt."""

    type: Literal["input_tokens"]
    value: int = Field(ge=0, le=_MOST)


class ToolUses(Strict):
    """A number of tool calls in the conversation."""

    type: Literal["tool_uses"]
    value: int = Field(ge=0, le=_MOST)


class ToolUsesEdit(Strict):
    """Leaves out the results of older tool calls, and the inputs of these calls where it says so."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] = InputTokens(
        type="input_tokens", value=100_000
    )
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: Annotated[list[Name], Field(max_length=MAX_TOOLS)] | None = None
    clear_tool_inputs: bool | Annotated[list[Name], Field(max_length=MAX_TOOLS)] | None = None

    def clears_input(self, tool: str) -> bool:
        return (
            tool in self.clear_tool_inputs if isinstance(self.clear_tool_inputs, list) else bool(self.clear_tool_inputs)
        )


class UnservedEdit(Strict):
    """Shortens long conversations by a summary, which is not written here."""

    type: Literal["compact_20260112"]


class ContextManagement(Strict):
    """Edits of the conversation before the model reads it."""

    edits: list[ThinkingEdit | ToolUsesEdit | UnservedEdit] = Field(default_factory=list, max_length=16)


def clear_tool_uses(
    messages: Sequence[Message], edit: ToolUsesEdit, count: Callable[[Sequence[Message]], int]
) -> tuple[Sequence[Message], dict[str, Any] | None]:
    """Return the messages after an edit, and its description for the reply; None if it changes nothing.

    count: returns the number of tokens of a conversation.
    """
    uses = [(str(call["id"]), str(call["function"]["name"])) for message in messages for call in message.tool_calls]
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    older = uses[: max(len(uses) - edit.keep.value, 0)]
    cleared = {use for use, name in older if use in answered and name not in (edit.exclude_tools or ())}
    if not cleared or (edit.trigger.type == "tool_uses" and len(uses) <= edit.trigger.value):
        return messages, None
    tokens = count(messages)
    if edit.trigger.type == "input_tokens" and tokens <= edit.trigger.value:
        return messages, None
    shorter = [_cleared(message, cleared, edit) for message in messages]
    saved = tokens - count(shorter)
    if saved <= 0 or (edit.clear_at_least is not None and saved < edit.clear_at_least.value):
        return messages, None
    return shorter, {"type": edit.type, "cleared_tool_uses": len(cleared), "cleared_input_tokens": saved}


def _cleared(message: Message, cleared: set[str], edit: ToolUsesEdit) -> Message:
    if message.role == "tool" and message.tool_call_id in cleared:
        return replace(message, content=_CLEARED)
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}}
        if call["id"] in cleared and edit.clears_input(call["function"]["name"])
        else call
        for call in message.tool_calls
    ]
    return replace(message, tool_calls=tuple(calls))
