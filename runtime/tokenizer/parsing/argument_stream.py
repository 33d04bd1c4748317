"""Reads the arguments of a tool call while they arrive, so that a long argument does not wait for its end.

The joined pieces are the text that `json.dumps` gives for the arguments of the whole call.
"""

import json
import re
from collections.abc import Callable, Mapping

from mycli.runtime.tokenizer.parsing.response_template import Region
from mycli.runtime.utils.json_fields import strict_json

_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrtu])*"'
# A call up to its first argument. Earlier it may turn out to be text, and nothing that was sent can be taken back.
_FIRST_ARGUMENT = rf'\{{\s*{_STRING}\s*:\s*(?=["\[{{tfn0-9-])'
_KEY = re.compile(r"\{content\.(\w+)\}")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[^,}\]\s]*")
_OUTSIDE, _IN_STRING = re.compile(r'["\[\]{}]'), re.compile(r'["\\\x00-\x1f]')
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
)
_ESCAPE_LENGTH = 12  # of a pair of surrogates


def head_pattern(region: Region) -> re.Pattern[str] | None:
    """Return a pattern for a call up to its first argument; None for a region whose calls are not one JSON object.

    Its groups: `name`, the name as a JSON string, missing where it stands before the object; `arguments`, which is
    empty, where they begin.
    """
    shape = region.transform.get("function", region.transform) if isinstance(region.transform, Mapping) else None
    if not isinstance(shape, Mapping) or region.transform_each or region.content != "json" or region.arguments:
        return None
    name, arguments = str(shape.get("name")), str(shape.get("arguments"))
    if (name, arguments) == ("{name}", "{content}"):
        return re.compile(rf"\s*(?P<arguments>){_FIRST_ARGUMENT}")
    keys = [_KEY.fullmatch(placeholder) for placeholder in (name, arguments)]
    if keys[0] is None or keys[1] is None:
        return None
    fields = rf'\{{\s*"{keys[0][1]}"\s*:\s*(?P<name>{_STRING})\s*,\s*"{keys[1][1]}"\s*:\s*(?P<arguments>)'
    return re.compile(rf"\s*{fields}{_FIRST_ARGUMENT}")


class CallStream:
    """Converts a call, step by step, to the text that `json.dumps` gives for its arguments.

    Strings are converted as they arrive, unless `cast` may change their type; other values when they are complete.
    `cast(key, text)` returns the value of a string argument; `casts(key)` says whether it can differ from the text.
    """

    def __init__(self, cast: Callable[[str, str], object], casts: Callable[[str], bool]) -> None:
        self._cast, self._casts = cast, casts
        self._key, self._empty = "", True
        self.complete = False
        self.broken = False  # the rest is not in the format

    def _convert(self, step: Callable[[], str | None]) -> str:
        """Repeat `step`, which converts something, or returns None until more text arrives."""
        pieces = []
        while not self.complete and not self.broken:
            try:
                piece = step()
            except (ValueError, RecursionError):
                self.broken = True
                break
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    def _dumps(self, value: object) -> str:
        return json.dumps(self._cast(self._key, value) if isinstance(value, str) else value, ensure_ascii=False)


class ArgumentStream(CallStream):
    """Converts the arguments of a call that are a JSON object, character by character."""

    def __init__(self, cast: Callable[[str, str], object], casts: Callable[[str], bool]) -> None:
        super().__init__(cast, casts)
        self._text = ""  # not converted yet
        self._step = self._begin
        self._scanned, self._depth, self._quoted = 0, 0, False  # of a value that is not complete

    def feed(self, text: str) -> str:
        """Return the converted text that is certain by now, up to the end of the object or what is not JSON."""
        self._text += text
        return self._convert(lambda: self._step())

    @property
    def rest(self) -> str:
        """The text that was not converted."""
        return self._text

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _skip_space(self) -> str:
        match = _SPACE.match(self._text)
        assert match is not None
        self._text = self._text[match.end() :]
        return self._text[:1]

    # Each step sets the next one.

    def _begin(self) -> str | None:
        if not self._skip_space():
            return None
        self._expect("{")
        self._step = self._before_key
        return "{"

    def _expect(self, mark: str) -> None:
        if self._take(1) != mark:
            raise ValueError(mark)

    def _before_key(self) -> str | None:
        first = self._skip_space()
        if not first:
            return None
        if first == "}" and self._empty:
            return self._end()
        if first != '"':
            raise ValueError(first)
        end = self._value_end()
        if end is None:
            return None
        key = str(strict_json(self._take(end).encode()))
        self._key, self._empty = key, False
        self._step = self._before_value
        return f"{json.dumps(key, ensure_ascii=False)}: "

    def _before_value(self) -> str | None:
        if not self._skip_space():
            return None
        if not self._text.startswith(":"):
            raise ValueError(":")
        if not self._text[1:].lstrip():
            return None
        self._take(1)
        if self._skip_space() == '"' and not self._casts(self._key):
            self._take(1)
            self._step = self._inside_string
            return '"'
        self._step = self._inside_value
        return ""

    def _inside_string(self) -> str | None:
        match = _PLAIN.match(self._text)
        assert match is not None
        if match.end():
            return self._take(match.end())
        if not self._text:
            return None
        if self._text[0] == '"':
            self._take(1)
            self._step = self._after_value
            return '"'
        escape = _ESCAPE.match(self._text)
        if escape is None and len(self._text) < _ESCAPE_LENGTH and self._text[0] == "\\":
            return None
        if escape is None:
            raise ValueError("escape")
        return json.dumps(strict_json(f'"{self._take(escape.end())}"'.encode()), ensure_ascii=False)[1:-1]

    def _inside_value(self) -> str | None:
        end = self._value_end()
        if end is None:
            return None
        converted = self._dumps(strict_json(self._text[:end].encode()))
        self._take(end)
        self._step = self._after_value
        return converted

    def _value_end(self) -> int | None:
        # The length of the value that the text begins with; None while it continues. The next call resumes the search.
        if self._text[0] not in '"[{':
            match = _SCALAR.match(self._text)
            assert match is not None
            return match.end() if match.end() < len(self._text) else None
        while (match := (_IN_STRING if self._quoted else _OUTSIDE).search(self._text, self._scanned)) is not None:
            mark, self._scanned = match[0], match.end()
            if mark == '"':
                self._quoted = not self._quoted
            elif mark in "[{":
                self._depth += 1
            elif mark in "]}":
                self._depth -= 1
            elif mark < " ":
                raise ValueError("control character")
            elif self._scanned == len(self._text):  # a backslash: the next character belongs to it
                self._scanned -= 1
                return None
            else:
                self._scanned += 1
            if self._depth == 0 and not self._quoted:
                end, self._scanned = self._scanned, 0
                return end
        self._scanned = len(self._text)
        return None

    def _after_value(self) -> str | None:
        mark = self._skip_space()
        if not mark:
            return None
        if mark == "}":
            return self._end()
        self._expect(",")
        self._step = self._before_key
        return ", "

    def _end(self) -> str:
        self._expect("}")
        self.complete = True
        return "}"
