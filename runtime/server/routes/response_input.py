"""Converts the input items of OpenAI's responses to the messages of chat templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.requests.item_store import ItemStore
from mycli.runtime.server.requests.schemas import ContentPart
from mycli.runtime.server.routes.responses_request import InputItem, OutputPart, ResponsesRequest, flat_name
from mycli.runtime.server.routes.wire import call_fields, non_text_parts, text_of
from mycli.runtime.tokenizer.chat_template import Message

_RESULTS = (
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output"),
    "apply_patch_call_output",
)
# Items of tools that OpenAI's servers run, and items that only they can read.
_OMITTED = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
        *("computer_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"),
        *("compaction_summary", "compaction_trigger", "tool_search_call", "tool_search_output", "additional_tools"),
        *("program", "program_output", "ghost_snapshot", "configuration_update"),
    )
)


class _Conversation:
    def __init__(self, items: ItemStore) -> None:
        self.messages: list[Message] = []
        self.omitted: list[str] = []
        self._items = items
        self._names: dict[str, str] = {}  # of called functions, by call id
        self._reasoning = ""  # before the message or call that it belongs to

    def add(self, item: InputItem, place: str) -> None:
        kind = item.type or ("message" if item.role is not None else "item_reference")
        if kind == "item_reference":
            self.add(self._find(item, place), place)
        elif kind == "message":
            self._add_message(item, place)
        elif kind == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            self._reasoning += text_of(parts or item.summary or [], f"{place}.content")
        elif kind in _RESULTS:
            content = item.output if isinstance(item.output, list) else None
            self.omitted += [
                f"part {kind}" for kind in non_text_parts(content) if kind
            ]  # "": printed by a shell command
            self._add_result(item.call_id or item.id, _output(item, place))
        elif kind == "mcp_call":
            self._add_call(item.id, item.name, item.arguments)
            self._add_result(item.id, _output(item, place))
        elif kind in _OMITTED:
            self.omitted.append(f"item {kind}")
        else:
            self._add_call(item.call_id, *self._call(kind, item, place))

    def _call(self, kind: str, item: InputItem, place: str) -> tuple[str, str | Mapping[str, Any]]:
        if kind == "function_call":
            return flat_name(item.name, item.namespace), item.arguments
        if kind == "custom_tool_call":
            return flat_name(item.name, item.namespace), {"input": item.input}
        if kind in ("local_shell_call", "shell_call"):
            return kind.removesuffix("_call"), item.action or {}
        if kind == "apply_patch_call":
            return "apply_patch", item.operation or {}
        message = f"{place}.type: {kind!r} is not supported"
        raise ApiError(400, message, "unsupported_content", param=f"{place}.type")

    def _find(self, item: InputItem, place: str) -> InputItem:
        stored = None if item.id is None else self._items.find(item.id)
        if stored is None:
            message = f"{place}: no item {(item.id or '')[:60]!r} is known here; send the item itself (store: false)"
            raise ApiError(404, message, "item_not_found", param=place)
        try:
            return InputItem.model_validate(stored)
        except ValidationError:  # not for items of this server
            raise ApiError(404, f"{place}: the item cannot be used", "item_not_found", param=place) from None

    def _add_message(self, item: InputItem, place: str) -> None:
        if item.role is None:
            raise ApiError(400, f"{place}.role: is required", "missing_required_parameter", param=f"{place}.role")
        reasoning = self._take_reasoning() if item.role == "assistant" else ""
        self.messages.append(Message(item.role, text_of(item.content, f"{place}.content"), reasoning=reasoning))

    def _add_call(self, call_id: str | None, name: str, arguments: str | Mapping[str, Any]) -> None:
        self._names[call_id or ""] = name
        call = call_fields(name, arguments, call_id or "")
        if self.messages and self.messages[-1].role == "assistant":  # templates expect parallel calls in one message
            last = self.messages.pop()
            reasoning = last.reasoning + self._take_reasoning()
            self.messages.append(Message("assistant", last.content, (*last.tool_calls, call), reasoning))
        else:
            self.messages.append(Message("assistant", "", (call,), self._take_reasoning()))

    def _add_result(self, call_id: str | None, text: str) -> None:
        self.messages.append(Message("tool", text, name=self._names.get(call_id or "", ""), tool_call_id=call_id or ""))

    def _take_reasoning(self) -> str:
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning


def _output(item: InputItem, place: str) -> str:
    """Return the output of a tool as the model reads it; without one, the error or the status."""
    output = item.output
    if isinstance(output, dict):
        raise invalid_value(f"{place}.output", "must be a string or a list")
    if output is None:
        error = item.error if isinstance(item.error, str) else json.dumps(item.error)
        return f"error: {error}" if item.error else item.status or ""
    if isinstance(output, str):
        return output
    parts = [ContentPart(type="text", text=_printed(part)) if part.outcome is not None else part for part in output]
    return text_of(parts, f"{place}.output", True)


def _printed(part: OutputPart) -> str:
    outcome = part.outcome or {}
    end = "timed out" if outcome.get("type") == "timeout" else f"exit code: {outcome.get('exit_code')}"
    return "\n".join(text for text in ((part.stdout or "").rstrip(), (part.stderr or "").rstrip(), end) if text)


def earlier_items(body: ResponsesRequest, conversations: ItemStore) -> Sequence[Mapping[str, Any]]:
    """Return the items of the conversation that a request continues; none without one. Raises ApiError."""
    name = body.previous_response_id
    if name is None:
        return ()
    stored = conversations.find(name)
    if stored is None:
        message = f"previous_response_id: no response {name[:60]!r} is stored here; send the whole conversation"
        raise ApiError(400, message, "previous_response_not_found", param="previous_response_id")
    return [*stored["input"], *stored["response"]["output"]]


def input_items(body: ResponsesRequest, ids: ReplyIds) -> list[Mapping[str, Any]]:
    """Return the items of a request's own input as JSON, each with an id: its own, or one of `ids`."""
    if isinstance(body.input, str):
        return [{"type": "message", "id": ids.next("msg_"), "role": "user", "content": body.input}]
    items = [item.model_dump(exclude_none=True, exclude_unset=True) for item in body.input]
    return [item if item.get("id") else {**item, "id": ids.next("msg_")} for item in items]


def input_messages(
    body: ResponsesRequest, items: ItemStore, earlier: Sequence[Mapping[str, Any]] = ()
) -> tuple[Sequence[Message], Sequence[str]]:
    """Return the messages of a request after `earlier` items, and the items that were left out. Raises ApiError."""
    conversation = _Conversation(items)
    if body.instructions is not None:  # those of earlier requests do not carry over
        conversation.messages.append(Message("system", body.instructions))
    for stored in earlier:
        conversation.add(InputItem.model_validate(stored), "previous_response_id")
    if isinstance(body.input, str):
        return [*conversation.messages, Message("user", body.input)], conversation.omitted
    for index, item in enumerate(body.input):
        conversation.add(item, f"input.{index}")
    return conversation.messages, conversation.omitted
