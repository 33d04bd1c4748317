"""Reads the arguments of a call that has an element for each while they arrive.

The joined pieces are the text that `json.dumps` gives for the arguments of the whole call.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from mycli.runtime.tokenizer.parsing.argument_stream import CallStream
from mycli.runtime.tokenizer.parsing.response_template import Region, Tag, loose_end, parse_content

_UNSTREAMED = ("cdata", "value_parser")  # a value is not the text that is written


def has_element_stream(region: Region) -> bool:
    """Return whether the calls of a region are a name that is captured and one element for each argument."""
    return (
        region.content == "xml-inline"
        and region.close is not None
        and region.transform == {"name": "{name}", "arguments": "{content}"}
        and not region.transform_each
        and not any(region.arguments.get(name) for name in _UNSTREAMED)
    )


class ElementStream(CallStream):
    """Converts the elements of a call to the text of a JSON object."""

    def __init__(self, region: Region, cast: Callable[[str, str], object], casts: Callable[[str], bool]) -> None:
        super().__init__(cast, casts)
        assert region.close is not None
        self._close = region.close
        self._tag: Tag = region.arguments["tag"]
        self._loose = bool(region.arguments.get("loose"))
        self._json: str | None = region.arguments.get("json_attribute")
        key, end = re.escape(self._tag.before_key), re.escape(self._tag.after_value)
        # As `loose_end`, less the end of the call. What may become an end holds the rest of a value back.
        self._next_key = re.compile(rf"{end}(?=\s*(?:{end}\s*){{0,3}}{key})|\n(?={key})")
        self._holds = (self._tag.after_value, f"\n{self._tag.before_key}") if self._loose else (self._tag.after_value,)
        self.end = 0  # the first character that was not converted; of a complete call, the first after it
        self._begin: int | None = None  # of the value that is being read
        self._is_json = False
        self._closing: re.Match[str] | None = None
        self._unsent = ""  # arguments of a call that may still be text
        self.started = False  # a string has begun: what is not in the format is part of the call from here on

    def feed(self, text: str, final: bool) -> str:
        """Return the converted text that is certain by now, empty until a string begins or the call is complete.

        text: all of the call so far.
        """
        certain = self._unsent + self._convert(lambda: self._step(text, final))
        decided = self.started or self.complete
        self._unsent = "" if decided else certain
        return certain if decided else ""

    def unread(self, text: str) -> str:
        """Return `text`, with which a call ends before it is complete, as it follows what was converted."""
        return _escaped(text) if self._begin is not None and self._is_string else text

    def _step(self, text: str, final: bool) -> str | None:
        self._closing, limit = self._close.find(text, self.end, final)
        limit = limit if self._closing is None else self._closing.start()
        closed = final or self._closing is not None
        return self._between(text, limit, closed) if self._begin is None else self._inside(text, limit, closed)

    # No key begins after `limit`; `closed`: the call ends there.

    def _between(self, text: str, limit: int, closed: bool) -> str | None:
        begin = text.find(self._tag.before_key, self.end, limit)
        if begin < 0:
            if not closed:
                return None
            self.complete = True
            self.end = limit if self._closing is None else self._closing.end()
            return "{}" if self._empty else "}"
        begin += len(self._tag.before_key)
        middle = text.find(self._tag.after_key, begin, limit)
        after = middle + len(self._tag.after_key)
        opened = text.find(self._tag.before_value, after, limit) if middle >= 0 else -1
        if opened < 0 or (self._loose and "<" in text[begin:middle]):
            if closed or opened >= 0:
                raise ValueError("a key is not closed")
            return None
        self.end = self._begin = opened + len(self._tag.before_value)
        self._key = text[begin:middle].strip()
        self._is_json = self._json is not None and self._json in text[middle:opened]
        start, self._empty = "{" if self._empty else ", ", False
        is_string = self._is_string
        self.started = self.started or is_string
        quote = '"' if is_string else ""
        return f"{start}{json.dumps(self._key, ensure_ascii=False)}: {quote}"

    @property
    def _is_string(self) -> bool:
        return not self._is_json and not self._casts(self._key)

    def _inside(self, text: str, limit: int, closed: bool) -> str | None:
        assert self._begin is not None
        bounds = self._value_end(text, self._begin, limit, closed)
        if not self._is_string:
            return None if bounds is None else self._converted(text[self._begin : bounds[0]], bounds[1])
        begin = self.end + (self.end == self._begin and text.startswith("\n", self.end))
        if bounds is None:
            end = self._certain(text, limit)
            if end <= begin:
                return None
            self.end = end
            return _escaped(text[begin:end])
        self.end, self._begin = bounds[1], None
        return _escaped(text[begin : bounds[0]].removesuffix("\n")) + '"'

    def _converted(self, text: str, end: int) -> str:
        value: Any = text.removeprefix("\n").removesuffix("\n")
        value = parse_content(value, "json", {}) if self._is_json else value
        self.end, self._begin = end, None
        return self._dumps(value)

    def _value_end(self, text: str, begin: int, limit: int, closed: bool) -> tuple[int, int] | None:
        # The end of the value and the position after its mark; None while it continues. Where every value has its
        # mark, that of the call may occur in a value.
        if not self._loose:
            end = text.find(self._tag.after_value, self.end)
            return None if end < 0 else (end, end + len(self._tag.after_value))
        match = self._next_key.search(text, self.end, limit)
        if match is not None:
            return match.span()
        if not closed:
            return None
        return loose_end(text[:limit], begin, self._tag, self._closing is not None)

    def _certain(self, text: str, limit: int) -> int:
        # The position up to which the text is certainly part of the value.
        begin, end = self.end, limit if self._loose else len(text)
        for mark in self._holds:
            at = text.find(mark, begin, end)
            lengths = range(len(mark) - 1, 0, -1)
            end = at if at >= 0 else end - next((n for n in lengths if text.endswith(mark[:n], begin, end)), 0)
        return end - text.endswith("\n", begin, end)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
