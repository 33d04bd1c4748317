"""Separates tool calls from the content of a reply while it streams, in the syntax of a `ToolFormat`.

Text that may start a call is held back. A call that cannot be parsed is text: never dropped, never an error.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mycli.runtime.tokenizer.chat_template import Tool
from mycli.runtime.tokenizer.parsing.response_template import Region
from mycli.runtime.tokenizer.parsing.tool_formats import ToolFormat
from mycli.runtime.utils.json_fields import strict_json

MAX_CALL = 1 << 20  # characters; a longer call is text


@dataclass(frozen=True)
class ToolCall:
    """A tool's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def _types(schema: Any) -> list[str]:
    # The types that a JSON schema allows at its top level.
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type") or []
    types = [name for name in ([declared] if isinstance(declared, str) else declared) if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        types += [name for choice in choices for name in _types(choice)] if isinstance(choices, list) else []
    return types


def _as_json(text: str, *kinds: type) -> Any:
    value = strict_json(text.strip().encode())
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(text)
    return value


def _as_integer(text: str) -> int:
    value = _as_json(text, int, float)
    if not math.isfinite(value) or value != int(value):
        raise ValueError(text)
    return int(value)


_CASTS: Mapping[str, Callable[[str], Any]] = {
    "integer": _as_integer,
    "number": lambda text: _as_json(text, int, float),
    "boolean": lambda text: _as_json(text.lower(), bool),
    "null": lambda text: _as_json(text.lower().replace("none", "null"), type(None)),
    "object": lambda text: _as_json(text, dict),
    "array": lambda text: _as_json(text, list),
}


def _cast(text: str, types: Sequence[str]) -> Any:
    # The first of `types` that `text` parses as; the string itself if none.
    for name in types:
        if name == "string":
            break
        try:
            return _CASTS[name](text)
        except (KeyError, ValueError):
            continue
    return text


class ToolParser:
    """Splits a streamed reply into text and calls. tools: as in a request; arguments get the types of their schemas."""

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for function in functions:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._schemas[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
        self._format = tool_format
        self._text = ""  # undecided
        self._blanks = ""  # whitespace before the undecided text: a call absorbs it
        self._region: Region | None = None
        self._captures: Mapping[str, str] = {}
        self._opening = ""
        self._begun = False  # whether anything but whitespace arrived
        self._called = False
        self._after_call = False  # whitespace after a call is dropped

    @property
    def called(self) -> bool:
        return self._called

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return the texts and calls decided by `text`, in order, none empty."""
        self._text += text
        return self._decide(final=False)

    def flush(self) -> list[str | ToolCall]:
        items = self._decide(final=True)
        if self._blanks and not self._called:
            items.append(self._blanks)
        self._blanks = ""
        return items

    def _decide(self, final: bool) -> list[str | ToolCall]:
        items: list[str | ToolCall] = []
        while self._inside(items, final) if self._region else self._outside(items, final):
            pass
        return items

    def _outside(self, items: list[str | ToolCall], final: bool) -> bool:
        # Emits text; returns True at the start of a call.
        if self._format.bare_json and not self._begun and (start := self._text.lstrip()):
            if start.startswith("{"):
                self._open(self._format.regions[0], {}, "")
                return True
            self._begun = True
        for ignored in self._format.ignored:
            self._text = self._text.replace(ignored, "")
        decided, best = len(self._text), None
        for region in self._format.regions:
            match, until = region.open.find(self._text, 0, final)
            if match is not None and (best is None or match.start() < best[1].start()):
                best = region, match
            decided = min(decided, until)
        if best is not None and best[1].start() <= decided:
            region, match = best
            self._emit(items, self._text[: match.start()])
            self._text = self._text[match.end() :]
            captures = {key: value for key, value in match.groupdict().items() if value is not None}
            self._open(region, captures, match[0])
            return True
        for ignored in () if final else self._format.ignored:  # the end may be the start of an ignored marker
            lengths = range(len(ignored) - 1, 0, -1)
            decided -= next((n for n in lengths if self._text[:decided].endswith(ignored[:n])), 0)
        self._emit(items, self._text[:decided])
        self._text = self._text[decided:]
        return False

    def _open(self, region: Region, captures: Mapping[str, str], opening: str) -> None:
        self._region, self._captures, self._opening, self._begun = region, captures, opening, True

    def _inside(self, items: list[str | ToolCall], final: bool) -> bool:
        # Emits the call if its end has arrived; returns True if text is left that may contain another.
        assert self._region is not None
        anchor = self._region.close or self._region.open
        match, _ = anchor.find(self._text, 0, final)
        if match is None and not final and len(self._text) <= MAX_CALL:
            return False
        body = self._text if match is None else self._text[: match.start()]
        closing = match[0] if match is not None and self._region.close else ""
        calls = self._read(self._region, body)
        self._region = None
        if calls is None:
            self._emit(items, self._opening + body + closing)
        else:
            items += calls
            self._called = self._after_call = True
            self._blanks = ""
        self._text = self._text[len(body) + len(closing) :]
        return bool(self._text)

    def _read(self, region: Region, body: str) -> list[ToolCall] | None:
        # The calls in a region's text; None if it does not follow the format.
        try:
            if len(body) > MAX_CALL:
                raise ValueError("too long")
            values = region.parse(body, self._captures)
            calls = [self._call(value.get("function", value) if isinstance(value, dict) else {}) for value in values]
        except (ValueError, RecursionError):
            return None
        if not self._opening and any(call.name not in self._schemas for call in calls):
            return None  # bare JSON is a call only with the name of a tool
        return calls

    def _call(self, value: Mapping[str, Any]) -> ToolCall:
        name, arguments = value.get("name"), value.get("arguments")
        if isinstance(arguments, str):
            arguments = strict_json(arguments.encode())
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("not a name and arguments")
        schema = self._schemas.get(name.strip(), {})
        typed = {
            key: _cast(item, _types(schema.get(key))) if isinstance(item, str) else item
            for key, item in arguments.items()
        }
        return ToolCall(name.strip(), json.dumps(typed, ensure_ascii=False))

    def _emit(self, items: list[str | ToolCall], text: str) -> None:
        # Whitespace at the end waits: a call would absorb it.
        content = text.rstrip()
        if not content:
            self._blanks += text
            return
        whole = self._blanks + content
        self._blanks = text[len(content) :]
        items.append(whole.lstrip() if self._after_call else whole)
        self._after_call = False
