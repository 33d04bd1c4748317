"""The output items of an OpenAI response (reasoning, message, calls) and the events that stream them."""

from collections.abc import Iterator
from typing import Any

from mycli.runtime.engine.reply_reader import Piece
from mycli.runtime.server.routes.wire import new_id

Event = tuple[str, dict[str, Any]]
# Item type -> type of its content part, after which its events are named.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """Builds items from pieces in order; one item is open at a time."""

    def __init__(self) -> None:
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def all(self) -> list[dict[str, Any]]:
        """Return the items so far."""
        return [*self._done, *([] if self._open is None else [self._open])]

    def add(self, piece: Piece) -> Iterator[Event]:
        """Add a piece and return its events."""
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.content:
            yield from self._grow("message", piece.content)
        for call in piece.calls:
            yield from self.close()
            item = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"), "name": call.name}
            place = {"item_id": item["id"], "output_index": len(self._done)}
            empty = {**item, "arguments": "", "status": "in_progress"}
            yield "response.output_item.added", {"output_index": place["output_index"], "item": empty}
            yield "response.function_call_arguments.delta", {**place, "delta": call.arguments}
            named = {"name": call.name, "arguments": call.arguments}
            yield "response.function_call_arguments.done", {**place, **named}
            whole = {**item, "arguments": call.arguments, "status": "completed"}
            self._done.append(whole)
            yield "response.output_item.done", {"output_index": place["output_index"], "item": whole}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
                self._open = {"type": kind, "id": new_id("msg_"), "role": "assistant"}
            else:
                self._open = {"type": kind, "id": new_id("rs_"), "summary": []}
            self._open |= {"status": "in_progress", "content": []}
            yield "response.output_item.added", {"output_index": len(self._done), "item": {**self._open}}
            self._open["content"] = [part]
            yield "response.content_part.added", {**self._place(), "part": {**part}}
        self._open["content"][0]["text"] += text
        yield self._text_event("delta", "delta", text)

    def close(self) -> Iterator[Event]:
        """Complete the open item, if there is one, and return its events."""
        item = self._open
        if item is None:
            return
        part = item["content"][0]
        yield self._text_event("done", "text", part["text"])
        yield "response.content_part.done", {**self._place(), "part": part}
        item["status"] = "completed"
        place = len(self._done)
        self._done.append(item)
        self._open = None
        yield "response.output_item.done", {"output_index": place, "item": item}

    def _text_event(self, what: str, field: str, text: str) -> Event:
        assert self._open is not None
        kind = self._open["type"]
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return f"response.{_PARTS[kind]}.{what}", {**self._place(), field: text, **extra}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}
