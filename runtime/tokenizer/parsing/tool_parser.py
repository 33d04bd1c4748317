"""Separates tool calls from the content of a reply while it streams, in the syntax of a `ToolFormat`.

Text that may start a call is held back. A call that cannot be parsed is text: never dropped, never an error.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mycli.runtime.tokenizer.chat_template import Tool
from mycli.runtime.tokenizer.parsing.argument_stream import ArgumentStream, head_pattern
from mycli.runtime.tokenizer.parsing.element_stream import ElementStream, has_element_stream
from mycli.runtime.tokenizer.parsing.python_calls import parse_python
from mycli.runtime.tokenizer.parsing.response_template import Region
from mycli.runtime.tokenizer.parsing.tool_formats import ToolFormat
from mycli.runtime.utils.json_fields import strict_json

MAX_CALL = 1 << 20  # characters; a longer call is text
_BETWEEN = " \t\r\n;"  # between bare objects
_BRACES = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool's name, and its arguments as the text of a JSON object; or the next part of these.

    index: the number of the call in its reply. Parts of a call after the first have the same index and no name. The
    joined arguments are not JSON if the reply ended within them, or the model wrote something else.
    """

    name: str
    arguments: str
    index: int = 0


def join_calls(parts: Iterable[ToolCall]) -> list[ToolCall]:
    """Join the parts of each call."""
    calls: dict[int, list[ToolCall]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [
        ToolCall(group[0].name, "".join([part.arguments for part in group]), index) for index, group in calls.items()
    ]


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


def _as_literal(text: str, kind: type) -> Any:
    # Templates of Qwen and Seed-OSS write lists and objects of earlier calls as Python does, and so do the models.
    try:
        return _as_json(text, kind)
    except ValueError:
        value = parse_python(text)
    if not isinstance(value, kind):
        raise ValueError(text)
    return value


def _split_objects(text: str) -> list[str]:
    # The JSON objects of a text, between which Llama writes semicolons.
    parts, begin, depth = list[str](), 0, 0
    for match in _BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match[0] == "}" and depth == 0:
            parts.append(text[begin : match.end()].lstrip(_BETWEEN))
            begin = match.end()
    rest = text[begin:].lstrip(_BETWEEN)
    return [*parts, rest] if rest or not parts else parts


_CASTS: Mapping[str, Callable[[str], Any]] = {
    "integer": _as_integer,
    "number": lambda text: _as_json(text, int, float),
    "boolean": lambda text: _as_json(text.lower(), bool),
    "null": lambda text: _as_json(text.lower().replace("none", "null"), type(None)),
    "object": lambda text: _as_literal(text, dict),
    "array": lambda text: _as_literal(text, list),
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


def _casts(types: Sequence[str]) -> bool:
    # Whether `_cast` may return anything but the string.
    return any(name in _CASTS for name in itertools.takewhile(lambda name: name != "string", types))


class ToolParser:
    """Splits a streamed reply into text and calls. tools: as in a request; arguments get the types of their schemas.

    single: drop all calls after the first; forced: the reply is calls, so that one that its end has cut is not text.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Tool], single: bool = False, forced: bool = False
    ) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for function in functions:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._schemas[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
        self._format, self._single, self._forced = tool_format, single, forced
        self._heads = [head_pattern(region) for region in tool_format.regions]
        self._text = ""  # undecided
        self._blanks = ""  # whitespace before the undecided text: a call absorbs it
        self._region: Region | None = None
        self._captures: Mapping[str, str] = {}
        self._opening = ""
        self._begun = False  # whether anything but whitespace arrived
        self._after_call = False  # whitespace after a call is dropped
        # Of a call that is passed on as it arrives; one of elements exists while the call may still be text.
        self._stream: ArgumentStream | ElementStream | None = None
        self._started = 0  # calls so far
        self.incomplete = False  # whether the arguments of a call ended early or are not JSON

    @property
    def called(self) -> bool:
        return self._started > 0

    @property
    def in_call(self) -> bool:
        """Whether a call has begun whose end has not come."""
        stream = self._stream
        return stream is not None and (isinstance(stream, ArgumentStream) or stream.started)

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return the texts and calls decided by `text`, in order, none empty."""
        self._text += text
        return self._decide(final=False)

    def flush(self) -> list[str | ToolCall]:
        if self._forced and self._region is None:
            self._text = ""  # the beginning of a mark
        items = self._decide(final=True)
        if self._blanks and not self.called:
            items.append(self._blanks)
        self._blanks = ""
        return items

    def _decide(self, final: bool) -> list[str | ToolCall]:
        items: list[str | ToolCall] = []
        while self._advance(items, final):
            pass
        return [item for item in items if not (self._single and isinstance(item, ToolCall) and item.index)]

    def _advance(self, items: list[str | ToolCall], final: bool) -> bool:
        # Returns True if more can be decided.
        if self._region is None:
            return self._outside(items, final)
        if self._stream is None:
            self._stream = self._begin_stream(self._region, items)
        if self._stream is None:
            return self._inside(self._region, items, final)
        if isinstance(self._stream, ElementStream):
            return self._pass_on_elements(self._region, self._stream, items, final)
        return self._pass_on(self._region, self._stream, items, final)

    def _outside(self, items: list[str | ToolCall], final: bool) -> bool:
        # Emits text; returns True at the start of a call.
        if self._format.bare_json and (self._after_call or not self._begun):
            start = self._text.lstrip(_BETWEEN if self._after_call else None)
            if start.startswith("{"):
                self._text = start if self._after_call else self._text
                self._open(self._format.regions[0], {}, "")
                return True
            if not start and not final:
                return False
            self._begun = True
        decided, best = len(self._text), None
        for region in self._format.regions:
            match, until = region.open.find(self._text, 0, final)
            if match is not None and (best is None or match.start() < best[1].start()):
                best = region, match
            decided = min(decided, until)
        if best is not None and best[1].start() <= decided:
            region, match = best
            self._emit(items, self._without_ignored(self._text[: match.start()]))
            self._text = self._text[match.end() :]
            captures = {key: value for key, value in match.groupdict().items() if value is not None}
            self._open(region, captures, match[0])
            return True
        for ignored in () if final else self._format.ignored:  # the end may be the start of an ignored marker
            lengths = range(len(ignored) - 1, 0, -1)
            decided -= next((n for n in lengths if self._text[:decided].endswith(ignored[:n])), 0)
        self._emit(items, self._without_ignored(self._text[:decided]))
        self._text = self._text[decided:]
        return False

    def _without_ignored(self, text: str) -> str:
        for ignored in self._format.ignored:
            text = text.replace(ignored, "")
        return text

    def _open(self, region: Region, captures: Mapping[str, str], opening: str) -> None:
        self._region, self._captures, self._opening, self._begun = region, captures, opening, True
        name = captures.get("name", "").strip()
        named = name in self._schemas and has_element_stream(region)
        self._stream = ElementStream(region, *self._casting(name)) if named else None

    def _end_region(self, text: str) -> bool:
        # Continues with the `text` after a call; returns True if it may contain another.
        self._text, self._region, self._stream = text, None, None
        return bool(text)

    def _casting(self, name: str) -> tuple[Callable[[str, str], object], Callable[[str], bool]]:
        # How arguments of a tool get their types, and whether one can have another type than string.
        schema = self._schemas[name]
        return (
            lambda key, text: _cast(text, _types(schema.get(key))),
            lambda key: _casts(_types(schema.get(key))),
        )

    def _inside(self, region: Region, items: list[str | ToolCall], final: bool) -> bool:
        # Emits the call if its end has arrived; returns True if text is left that may contain another.
        anchor = region.close or region.open
        match, _ = anchor.find(self._text, 0, final)
        if match is None and not final and len(self._text) <= MAX_CALL:
            return False
        body = self._text if match is None else self._text[: match.start()]
        closing = match[0] if match is not None and region.close else ""
        calls = self._read(region, body, match is not None)
        if calls is None and not (self._forced and match is None):
            self._emit(items, self._opening + body + closing)
        elif calls is not None:
            items += [ToolCall(call.name, call.arguments, self._started + at) for at, call in enumerate(calls)]
            self._started += len(calls)
            self._after_call = True
            self._blanks = ""
        return self._end_region(self._text[len(body) + len(closing) :])

    def _begin_stream(self, region: Region, items: list[str | ToolCall]) -> ArgumentStream | None:
        # Starts to pass a call on once its name is that of a tool and its first argument has begun.
        head = self._heads[self._format.regions.index(region)]
        match = None if head is None else head.match(self._text)
        if match is None:
            return None
        written = match.groupdict().get("name")
        name = str(self._captures.get("name", "") if written is None else json.loads(written)).strip()
        if name not in self._schemas:
            return None
        self._text = self._text[match.end("arguments") :]
        self._begin_call(name, items)
        return ArgumentStream(*self._casting(name))

    def _begin_call(self, name: str, items: list[str | ToolCall]) -> None:
        self._blanks, self._after_call = "", True
        items.append(ToolCall(name, "", self._started))
        self._started += 1

    def _pass_on_elements(
        self, region: Region, elements: ElementStream, items: list[str | ToolCall], final: bool
    ) -> bool:
        # Passes on what is certain of the arguments; returns True if more can be decided.
        begun = elements.started
        arguments, end = elements.feed(self._text, final), elements.end
        if not (elements.started or elements.complete):
            undecided = not (elements.broken or final or len(self._text) > MAX_CALL)
            return False if undecided else self._inside(region, items, final)
        if not begun:
            self._begin_call(self._captures["name"].strip(), items)
        self._append(items, arguments)
        if not elements.complete:
            if not (elements.broken or final):
                return False
            # The rest of a call that is not in the format is passed on as it is, up to its closing mark.
            assert region.close is not None
            match, _ = region.close.find(self._text, end, final)
            if match is None and not final:
                return False
            begin, end = end, len(self._text) if match is None else match.end()
            self._append(items, elements.unread(self._text[begin : end if match is None else match.start()]))
            self.incomplete = True
        return self._end_region(self._text[end:])

    def _pass_on(self, region: Region, stream: ArgumentStream, items: list[str | ToolCall], final: bool) -> bool:
        # Passes on what is certain of the arguments; returns True if more can be decided.
        if stream.complete:
            return self._end_call(region, final)
        if not stream.broken:
            arguments = stream.feed(self._text)
            self._text = stream.rest if stream.complete or stream.broken else ""
            self._append(items, arguments)
            if stream.complete or stream.broken:
                return True
            if final:
                self._append(items, stream.rest)
                self._end_region("")
                self.incomplete = True
            return False
        # The rest of a call that is not JSON is passed on as it is, up to its closing mark.
        self.incomplete = True
        anchor = region.close or region.open
        match, decided = anchor.find(self._text, 0, final)
        end = decided if match is None else match.start()
        self._append(items, self._text[:end])
        self._text = self._text[end if match is None or region.close is None else match.end() :]
        if match is not None or final:
            self._end_region(self._text)
        return match is not None

    def _append(self, items: list[str | ToolCall], arguments: str) -> None:
        if arguments:
            items.append(ToolCall("", arguments, self._started - 1))

    def _end_call(self, region: Region, final: bool) -> bool:
        # Drops what follows the arguments of a call: the brace of its object and the closing mark.
        if region.close is not None:
            match, _ = region.close.find(self._text, 0, final)
            if match is None and not final:
                return False
            end = len(self._text) if match is None else match.end()
        else:
            start = self._text.lstrip()
            head = self._heads[self._format.regions.index(region)]
            named = head is not None and "name" in head.groupindex
            if named and not start and not final:
                return False
            end = len(self._text) - len(start) + (named and start.startswith("}"))
        return self._end_region(self._text[end:])

    def _read(self, region: Region, body: str, closed: bool) -> list[ToolCall] | None:
        # The calls in a region's text; None if it does not follow the format.
        try:
            if len(body) > MAX_CALL:
                raise ValueError("too long")
            bodies = _split_objects(body) if self._format.bare_json else [body]
            values = [value for part in bodies for value in region.parse(part, self._captures, closed)]
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
