"""Separates the calls of tools from what a model says, as it streams.

Driven by data: a `ToolFormat` says where calls stand and how they are written. Text that may begin a call is held back;
a call that cannot be read is given as the text it is, never dropped and never an error. Does not know templates,
reasoning (`runtime.tokenizer.parsing.reasoning_parser`) or what a tool does.
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

MAX_CALL = 1 << 20  # characters; what is longer is text


@dataclass(frozen=True)
class ToolCall:
    """A tool's name, and its arguments as a JSON object."""

    name: str
    arguments: str


def _types(schema: Any) -> list[str]:
    """The types that a JSON schema allows at its top."""
    if not isinstance(schema, dict):
        return []
    given = schema.get("type")
    found = [given] if isinstance(given, str) else [one for one in given if isinstance(one, str)] if given else []
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        found += [one for choice in choices for one in _types(choice)] if isinstance(choices, list) else []
    return found


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
    """`text` as the first of `types` that it can be; a string where it can be none."""
    for name in types:
        if name == "string":
            break
        try:
            return _CASTS[name](text)
        except (KeyError, ValueError):
            continue
    return text


class ToolParser:
    """Feed pieces of text, get pieces of text and calls. `tools` as in a request: arguments get their types."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for function in functions:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._schemas[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
        self._form = form
        self._text = ""  # not yet decided
        self._blanks = ""  # blanks before what is not decided: a call swallows them
        self._region: Region | None = None
        self._captures: Mapping[str, str] = {}
        self._opening = ""
        self._begun = False  # whether anything but blanks came
        self._called = False
        self._behind = False  # a call, whose following blanks mean nothing

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._called

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is decided by one more piece: texts and calls, in order, none empty."""
        self._text += text
        return self._decide(final=False)

    def flush(self) -> list[str | ToolCall]:
        """The rest, when no more text comes."""
        found = self._decide(final=True)
        if self._blanks and not self._called:
            found.append(self._blanks)
        self._blanks = ""
        return found

    def _decide(self, final: bool) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while self._inside(found, final) if self._region else self._outside(found, final):
            pass
        return found

    def _outside(self, found: list[str | ToolCall], final: bool) -> bool:
        """Give what is no call; True where a call begins."""
        if self._form.bare and not self._begun and (start := self._text.lstrip()):
            if start.startswith("{"):
                self._open(self._form.regions[0], {}, "")
                return True
            self._begun = True
        for one in self._form.ignored:
            self._text = self._text.replace(one, "")
        sure, best = len(self._text), None
        for region in self._form.regions:
            match, until = region.open.find(self._text, 0, final)
            if match is not None and (best is None or match.start() < best[1].start()):
                best = region, match
            sure = min(sure, until)
        if best is not None and best[1].start() <= sure:
            region, match = best
            self._give(found, self._text[: match.start()])
            self._text = self._text[match.end() :]
            captures = {key: value for key, value in match.groupdict().items() if value is not None}
            self._open(region, captures, match[0])
            return True
        for one in () if final else self._form.ignored:  # it may be half there
            sure = next((sure - n for n in range(len(one) - 1, 0, -1) if self._text[:sure].endswith(one[:n])), sure)
        self._give(found, self._text[:sure])
        self._text = self._text[sure:]
        return False

    def _open(self, region: Region, captures: Mapping[str, str], opening: str) -> None:
        self._region, self._captures, self._opening, self._begun = region, captures, opening, True

    def _inside(self, found: list[str | ToolCall], final: bool) -> bool:
        """Give the call whose end is there; True where text is left that may hold another."""
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
            self._give(found, self._opening + body + closing)
        else:
            found += calls
            self._called = self._behind = True
            self._blanks = ""
        self._text = self._text[len(body) + len(closing) :]
        return bool(self._text)

    def _read(self, region: Region, body: str) -> list[ToolCall] | None:
        """The calls that a region's text stands for; None where it is not of the form."""
        try:
            if len(body) > MAX_CALL:
                raise ValueError("too long")
            values = region.parse(body, self._captures)
            calls = [self._call(value.get("function", value) if isinstance(value, dict) else {}) for value in values]
        except (ValueError, RecursionError):
            return None
        bare = not self._opening
        return None if bare and any(call.name not in self._schemas for call in calls) else calls

    def _call(self, value: Mapping[str, Any]) -> ToolCall:
        name, arguments = value.get("name"), value.get("arguments")
        if isinstance(arguments, str):
            arguments = strict_json(arguments.encode())
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("not a name and arguments")
        schema = self._schemas.get(name.strip(), {})
        typed = {
            key: _cast(one, _types(schema.get(key))) if isinstance(one, str) else one for key, one in arguments.items()
        }
        return ToolCall(name.strip(), json.dumps(typed, ensure_ascii=False))

    def _give(self, found: list[str | ToolCall], text: str) -> None:
        """Text that is certain, without the blanks at its end, which a call would swallow."""
        kept = text.rstrip()
        if not kept:
            self._blanks += text
            return
        whole = self._blanks + kept
        self._blanks = text[len(kept) :]
        found.append(whole.lstrip() if self._behind else whole)
        self._behind = False
