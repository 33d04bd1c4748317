"""The output items of an OpenAI response (reasoning, message, calls) and the events that stream them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.routes.responses_request import ToolIdentity
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall

Event = tuple[str, dict[str, Any]]
Logprobs = Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]]
# Item type -> type of its content part, after which its events are named.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_CUSTOM_INPUT = re.compile(r'\{"input": "((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')


class OutputItems:
    """Builds items from pieces in order; one item is open at a time.

    identities: what the client calls a tool, where the model has another name for it; logprobs: converts those of the
    text's tokens.
    """

    def __init__(self, identities: Mapping[str, ToolIdentity], logprobs: Logprobs, ids: ReplyIds) -> None:
        self._identities, self._logprobs, self._ids = identities, logprobs, ids
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._arguments = ""  # of the open call
        self._calls = 0
        self._pending: list[tuple[int, TokenLogprob]] = []  # of text after a number of calls

    def all(self) -> list[dict[str, Any]]:
        """Return the items so far."""
        return [*self._done, *([] if self._open is None else [self._open])]

    def add(self, piece: Piece) -> Iterator[Event]:
        """Add a piece and return its events."""
        self._pending += piece.text_logprobs
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        for part in piece.parts:
            yield from self._grow("message", part) if isinstance(part, str) else self._add_call(part)

    def _add_call(self, call: ToolCall) -> Iterator[Event]:
        if call.name:
            yield from self.close()
            identity = self._identities.get(call.name, ToolIdentity(call.name))
            kind, prefix = ("custom_tool_call", "ctc_") if identity.custom else ("function_call", "fc_")
            space = {} if identity.namespace is None else {"namespace": identity.namespace}
            ids = {"id": self._ids.next(prefix), "call_id": self._ids.next("call_")}
            item = {"type": kind, **ids, "name": identity.name, **space}
            self._open = {**item, "input" if identity.custom else "arguments": "", "status": "in_progress"}
            self._arguments = ""
            self._calls += 1
            yield "response.output_item.added", {"output_index": len(self._done), "item": {**self._open}}
        assert self._open is not None
        self._arguments += call.arguments
        if self._open["type"] == "custom_tool_call":
            before, text = self._open["input"], _custom_input(self._arguments)
            delta, self._open["input"] = text[len(before) :], text
            kind = "response.custom_tool_call_input.delta"
        else:
            delta, self._open["arguments"] = call.arguments, self._arguments
            kind = "response.function_call_arguments.delta"
        if delta:
            yield kind, {**self._call_place(), "delta": delta}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                self._open = {"type": kind, "id": self._ids.next("msg_"), "role": "assistant"}
            else:
                self._open = {"type": kind, "id": self._ids.next("rs_"), "summary": []}
            self._open |= {"status": "in_progress", "content": []}
            yield "response.output_item.added", {"output_index": len(self._done), "item": {**self._open}}
            self._open["content"] = [part]
            yield "response.content_part.added", {**self._place(), "part": {**part}}
        part = self._open["content"][0]
        part["text"] += text
        extra: dict[str, Any] = {}
        if kind == "message":
            extra = {"logprobs": self._logprobs([entry for calls, entry in self._pending if calls == self._calls])}
            part["logprobs"] = part["logprobs"] + extra["logprobs"]
            self._pending = [(calls, entry) for calls, entry in self._pending if calls > self._calls]
        yield f"response.{_PARTS[kind]}.delta", {**self._place(), "delta": text, **extra}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one, and return its events; status: "incomplete" for one that was cut."""
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._call_place(), **named}
        elif item["type"] == "custom_tool_call":
            other = self._arguments not in ("", "{}") and _CUSTOM_INPUT.match(self._arguments) is None
            if other and status == "completed":  # the model has written other arguments: the client can tell it so
                item["input"] = self._arguments
                yield "response.custom_tool_call_input.delta", {**self._call_place(), "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**self._call_place(), "input": item["input"]}
        else:
            part, kind = item["content"][0], _PARTS[item["type"]]
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield f"response.{kind}.done", {**self._place(), "text": part["text"], **extra}
            yield "response.content_part.done", {**self._place(), "part": part}
        item["status"] = status
        place = len(self._done)
        self._done.append(item)
        self._open = None
        yield "response.output_item.done", {"output_index": place, "item": item}

    def _call_place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done)}

    def _place(self) -> dict[str, Any]:
        return {**self._call_place(), "content_index": 0}


def _custom_input(arguments: str) -> str:
    # The input of a custom tool in the arguments of its function, {"input": TEXT}, as far as they have come.
    match = _CUSTOM_INPUT.match(arguments)
    return "" if match is None else str(json.loads(f'"{match[1]}"'))
