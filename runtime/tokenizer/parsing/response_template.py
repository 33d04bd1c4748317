"""Reads and checks the `response_template` of a model, which describes the fields of its replies.

A field is a region between two anchors with a content type and a transform, as in transformers 5.23
(`utils/chat_parsing`). Only patterns with bounded backtracking are accepted: a model's pattern is untrusted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.parsing.python_calls import parse_python_calls
from mycli.runtime.utils.json_fields import Fields, strict_json

MAX_PATTERN = 256  # characters
MAX_ANCHOR = 512  # characters that a pattern may match and a stream holds back
MAX_REPEATS = 3  # in a pattern: an attempt to match takes at most MAX_ANCHOR to this power / 6 steps, 22 million
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_CONTENTS = ("text", "json", "xml-inline", "kv-lines")  # of a model's template; `parse_content` reads two more


@dataclass(frozen=True)
class Anchor:
    """The start or end of a region; every match begins with one of the literals `starts`."""

    pattern: re.Pattern[str]
    starts: tuple[str, ...]

    def find(self, text: str, begin: int, final: bool) -> tuple[re.Match[str] | None, int]:
        """Return the first match from `begin`, and the position before which there is certainly none.

        Unless `final`, more text may follow, so a possible start of a match is not decided.
        """
        match = self.pattern.search(text, begin)
        if final:
            return match, len(text)
        decided = min((self._undecided(text, begin, start) for start in self.starts), default=len(text))
        if match is not None and (match.start() < decided or match.end() < len(text)):
            return match, match.start()
        return None, decided

    def _undecided(self, text: str, begin: int, start: str) -> int:
        # The first position that may still become a match starting with `start`.
        at = text.find(start, max(begin, len(text) - MAX_ANCHOR))
        if at >= 0 and self.pattern.pattern != re.escape(start):
            return at
        for length in range(min(len(start) - 1, len(text) - begin), 0, -1):
            if text.endswith(start[:length]):
                return len(text) - length
        return len(text)


class Tag(NamedTuple):
    """The literals around the key and around the value of an element; `before_value` follows `after_key`."""

    before_key: str
    after_key: str
    before_value: str
    after_value: str


@dataclass(frozen=True)
class Region:
    """One field of a reply. Without `close` it ends at the next `open`, or at the end of the reply."""

    name: str
    open: Anchor
    close: Anchor | None
    content: str = "text"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    transform: Any = None
    transform_each: bool = False

    def parse(self, text: str, captures: Mapping[str, str], closed: bool = True) -> list[Any]:
        """Return the values of a region's text. Raises ValueError for text of another content type.

        closed: the end of the region was found; without it the text may be cut.
        """
        value = parse_content(text, self.content, self.arguments, closed)
        if self.transform is None:
            return [value]
        if not self.transform_each:
            return [_transform(self.transform, {**captures, "content": value})]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("not a list of objects")
        return [_transform(self.transform, {**captures, **item}) for item in value]


def parse_content(text: str, kind: str, arguments: Mapping[str, Any], closed: bool = True) -> Any:
    """Parse `text` of the content type `kind`; see `Region.parse`. Raises ValueError."""
    if kind == "json":
        return _json(text, arguments)
    if kind == "json-by-name":
        return [{"name": name, "arguments": value} for item in _json(text, arguments) for name, value in item.items()]
    if kind == "python-calls":
        return parse_python_calls(text)
    if kind == "xml-inline":
        return _xml(text, arguments, closed)
    if kind == "kv-lines":
        separator = arguments.get("kv_sep", ":")
        lines = (line.split(separator, 1) for line in text.split(arguments.get("line_sep", "\n")) if separator in line)
        return {key.strip(): _value(value.strip(), arguments) for key, value in lines}
    return text.strip() if arguments.get("strip", True) else text


def _value(text: str, arguments: Mapping[str, Any]) -> Any:
    inner = arguments.get("value_parser")
    return text if inner is None else parse_content(text, inner.get("name", "text"), inner.get("args", {}))


def _json(text: str, arguments: Mapping[str, Any]) -> Any:
    # JSON with the variations that some models write: other string delimiters, unquoted keys and Python's None.
    delimiters = arguments.get("string_delims", ())
    if delimiters and ("\x01" in text or "\x02" in text):
        raise ValueError("a character that stands for strings")
    captured: list[str] = []
    for opening, closing in delimiters:

        def capture(match: re.Match[str]) -> str:
            captured.append(match[1])
            return f"\x01{len(captured) - 1}\x02"

        text = re.sub(f"{re.escape(opening)}(.*?){re.escape(closing)}", capture, text, flags=re.DOTALL)
    if arguments.get("python_none"):
        text = re.sub(r"\bNone\b(?!\s*:)", "null", text)
    if arguments.get("unquoted_keys"):
        text = re.sub(r"(?<=[{,])\s*([\w.$-]+):", r'"\1":', text)
    if delimiters:
        text = re.sub("\x01(\\d+)\x02", lambda match: json.dumps(captured[int(match[1])]), text)
    try:
        return strict_json(text.strip().encode())
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip()
        raise


def _xml(text: str, arguments: Mapping[str, Any], closed: bool) -> dict[str, Any]:
    # json_attribute: what stands between key and value where the value is JSON; cdata: values may stand in a CDATA
    # section.
    tag: Tag = arguments["tag"]
    loose = bool(arguments.get("loose"))
    fields: dict[str, Any] = {}
    position = 0
    while (begin := text.find(tag.before_key, position)) >= 0:
        begin += len(tag.before_key)
        middle = text.find(tag.after_key, begin)
        opened = text.find(tag.before_value, middle + len(tag.after_key)) if middle >= 0 else -1
        if opened < 0 or (loose and "<" in text[begin:middle]):
            raise ValueError("a key is not closed")
        attributes, opened = text[middle:opened], opened + len(tag.before_value)
        quoted = _cdata(tag.after_value).match(text, opened) if arguments.get("cdata") else None
        if quoted is not None:
            value, position = quoted[1], quoted.end()
        else:
            end, position = (loose_end if loose else _strict_end)(text, opened, tag, closed)
            value = text[opened:end].removeprefix("\n").removesuffix("\n")
        is_json = "json_attribute" in arguments and arguments["json_attribute"] in attributes
        fields[text[begin:middle].strip()] = _json(value, {}) if is_json else _value(value, arguments)
    return fields


def _cdata(after_value: str) -> re.Pattern[str]:
    return re.compile(rf"\s*<!\[CDATA\[(.*?)\]\]>\s*{re.escape(after_value)}", re.DOTALL)


def _strict_end(text: str, begin: int, tag: Tag, closed: bool) -> tuple[int, int]:
    # Where the value that begins at `begin` ends, and the position after its closing mark.
    end = text.find(tag.after_value, begin)
    if end < 0:
        raise ValueError("an element is not closed")
    return end, end + len(tag.after_value)


def loose_end(text: str, begin: int, tag: Tag, closed: bool) -> tuple[int, int]:
    """Return the end of the value that begins at `begin`, and the position after its closing mark."""
    # Qwen3-Coder leaves out closing marks: the next key on a line of its own also ends a value, and so does the end of
    # the call. A closing mark inside a value, which something else follows, does not.
    key, end = re.escape(tag.before_key), re.escape(tag.after_value)
    match = re.compile(rf"{end}(?=\s*(?:{end}\s*){{0,3}}(?:{key}|\Z))|\n(?={key})").search(text, begin)
    if match is not None:
        return match.span()
    if closed and tag.after_value not in text[begin:]:
        return len(text), len(text)
    return _strict_end(text, begin, tag, closed)


def _transform(shape: Any, values: Mapping[str, Any]) -> Any:
    # Replaces each string "{name.key}" in `shape` by that entry of `values`.
    if isinstance(shape, dict):
        return {key: _transform(inner, values) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [_transform(inner, values) for inner in shape]
    whole = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if whole is None:
        return shape
    value: Any = values
    for key in whole[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {whole[1]}")
        value = value[key]
    return value


def literal(*texts: str) -> Anchor:
    ordered = sorted(texts, key=len, reverse=True)
    return Anchor(re.compile("|".join(map(re.escape, ordered))), tuple(ordered))


def pattern(source: str, *starts: str) -> Anchor:
    """Return an anchor for a trusted regular expression whose matches begin with one of `starts`."""
    return Anchor(re.compile(source, re.DOTALL), starts)


_LITERAL = r"[^\\\[\](){}*+?.|^$]|\\[^\w\s]"
_CLASS = r"\[\^?(?:[^\\\[\]]|\\.)+\]"
_REPEAT = re.compile(rf"(\\[swdn]|{_CLASS})([*+])")
_SAFE = re.compile(
    rf"(?P<start>(?:{_LITERAL})+)(?:{_LITERAL}|\\[swdn][*+?]?|{_CLASS}[*+]?|\(\?P<\w+>(?:{_CLASS}|\\[wd])[*+]\))*"
)


def _checked_pattern(source: str, raw: Fields, key: str) -> Anchor:
    # Accepts literals, repeated classes and named groups of one class, no nested repeats. Repeats end after MAX_ANCHOR
    # characters, so that backtracking is bounded however long the reply is.
    safe = _SAFE.fullmatch(source) if len(source) <= MAX_PATTERN else None
    if safe is None or len(re.findall(r"[^\\][*+]", source)) > MAX_REPEATS:
        raise raw.fail(key, "is a pattern that is not supported", "allowed: literals, classes and named groups")
    start = re.sub(r"\\(.)", r"\1", safe["start"])
    bounded = _REPEAT.sub(lambda repeat: f"{repeat[1]}{{{int(repeat[2] == '+')},{MAX_ANCHOR}}}", source)
    try:
        return pattern(bounded, start)
    except re.error as error:
        raise raw.fail(key, f"is not a regular expression: {error}") from None


def _anchor(raw: Fields, key: str) -> Anchor | None:
    value = raw.values.get(key)
    if value is not None:
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(entry, str) and 0 < len(entry) <= 256 for entry in texts)
        ):
            raise raw.fail(key, "must be a string or a list of strings, none empty")
        return literal(*texts)
    source = raw.values.get(f"{key}_pattern")
    if source is None:
        return None
    if not isinstance(source, str):
        raise raw.fail(f"{key}_pattern", "must be a string")
    return _checked_pattern(source, raw, f"{key}_pattern")


def read_response_template(raw: Fields) -> Sequence[Region]:
    """Return the regions of a `response_template` that have a start; the field without one is the remaining text.

    Raises ModelError for a damaged or unsupported template.
    """
    if raw.values.get("version", 1) != 1:
        raise raw.fail("version", "is not 1")
    regions = []
    fields = raw.object("fields")
    for name in fields.values:
        entry = fields.object(name)
        start, content = _anchor(entry, "open"), entry.text("content", "text")
        if content not in _CONTENTS:
            raise entry.fail("content", f"{content!r:.40} is not one of {', '.join(_CONTENTS)}")
        arguments = dict(entry.object("content_args").values)
        if not _readable(arguments):
            raise entry.fail("content_args", "are not supported", "allowed: separators, delimiters and a value parser")
        if content == "xml-inline":
            arguments["tag"] = _tag(entry, arguments.get("tag_pattern"))
        if start is not None:
            transform, transform_each = entry.values.get("transform"), entry.boolean("transform_each", False)
            regions.append(Region(name, start, _anchor(entry, "close"), content, arguments, transform, transform_each))
    if not regions:
        raise ModelError(f"{raw.source}: names no region", "the file may be made for another tool")
    return regions


def _readable(arguments: Mapping[str, Any]) -> bool:
    # Whether `parse_content` can use the arguments, also those of the parser of values.
    separators = [arguments[name] for name in ("kv_sep", "line_sep") if name in arguments]
    delimiters = arguments.get("string_delims", [])
    if not isinstance(delimiters, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in delimiters):
        return False
    marks = [*separators, *(mark for pair in delimiters for mark in pair)]
    if not all(isinstance(mark, str) and mark for mark in marks):
        return False
    inner = arguments.get("value_parser")
    if inner is None:
        return True
    if not isinstance(inner, dict) or inner.get("name", "text") not in ("text", "json", "kv-lines"):
        return False
    return isinstance(inner.get("args", {}), dict) and _readable(inner.get("args", {}))


def _tag(raw: Fields, source: object) -> Tag:
    # The literals of a tag pattern such as <a=(?P<key>\w+)>(?P<value>.*?)</a>; \s* in between is skipped.
    group = r"\(\?P<(?:key|value)>(?:\\w|\.|\[\^?[^\[\]]*\])[*+]\??\)"
    parts = re.split(group, source) if isinstance(source, str) else []
    if len(parts) == 3:
        after_key, _, before_value = parts[1].partition(r"\s*")
        tag = Tag(*(re.sub(r"\\([^\w\s])", r"\1", part) for part in (parts[0], after_key, before_value, parts[2])))
        if tag.before_key and tag.after_key and tag.after_value and "\\" not in "".join(tag):
            return tag
    raise raw.fail("tag_pattern", "is a pattern that is not supported", "allowed: literals, a key and a value")
