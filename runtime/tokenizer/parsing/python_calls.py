"""Reads calls that models write as Python: `[f(a="x", b=[1, None]), g()]` (LFM2, OLMo 3).

The text is rewritten to JSON token by token: Python's own parser can overflow the stack on nested input.
"""

import json
import re
from typing import Any

from mycli.runtime.utils.json_fields import strict_json

_NAME = r"[^\W\d][\w.-]*"
_TOKEN = re.compile(
    r'(?P<long>"{3}.*?"{3}|\'{3}.*?\'{3})'
    r'|(?P<string>"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\')'
    r"|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    rf"|(?P<call>{_NAME})\s*\(|(?P<key>{_NAME})\s*=|(?P<constant>{_NAME})|(?P<mark>[()\[\]{{}},:])",
    re.DOTALL,
)
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"(": ("[", ")", "]"), "[": ("[", "]", "]"), "{": ("{", "}", "}")}  # as written, its end, and in JSON


def parse_python(text: str) -> Any:
    """Return the value of a Python literal; a call `f(a=1)` becomes {"name": "f", "arguments": {"a": 1}}.

    JSON's constants are accepted too. Raises ValueError.
    """
    pieces: list[str] = []
    ends: list[tuple[str, str]] = []  # of the open brackets: in Python and in JSON
    at, length = 0, len(text.rstrip())
    while at < length:
        token = _TOKEN.match(text, _space_end(text, at))
        if token is None:
            raise ValueError(f"not Python: {text[at : at + 20]!r}")
        at = token.end()
        mark = token["mark"]
        if mark is None:
            if pieces and pieces[-1] == "}}" and token["call"] is not None:  # calls on lines of their own
                pieces.append(",")
            pieces.append(_converted(token))
            if token["call"] is not None:
                ends.append((")", "}}"))
        elif mark in _BRACKETS:
            opened, *end = _BRACKETS[mark]
            pieces.append(opened)
            ends.append((end[0], end[1]))
        elif mark in ",:":
            pieces.append(mark)
        elif ends and ends[-1][0] == mark:
            if pieces[-1] == ",":  # a trailing comma
                pieces.pop()
            pieces.append(ends.pop()[1])
        else:
            raise ValueError(f"not Python: {mark!r} is not open")
    return strict_json("".join(pieces).encode())


def parse_python_calls(text: str) -> list[Any]:
    """Return the calls of a list, or of several separated by commas or line breaks. Raises ValueError."""
    text = text.strip()
    calls = parse_python(text if text.startswith("[") else f"[{text}]")
    if not isinstance(calls, list):
        raise ValueError("not a list of calls")
    return calls


def _space_end(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _converted(token: re.Match[str]) -> str:
    quoted = token["string"] or token["long"]
    if quoted is not None:
        quotes = 1 if token["long"] is None else 3
        return json.dumps(_ESCAPE.sub(_unescape, quoted[quotes:-quotes]))
    if token["number"] is not None:
        number = token["number"]
        return json.dumps(int(number) if number.lstrip("+-").isdigit() else float(number))
    if token["call"] is not None:
        return f'{{"name": {json.dumps(token["call"])}, "arguments": {{'
    if token["key"] is not None:
        return f"{json.dumps(token['key'])}:"
    if token["constant"] not in _CONSTANTS:
        raise ValueError(f"not a literal: {token['constant']:.40}")
    return _CONSTANTS[token["constant"]]


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return _ESCAPES.get(match[4], match[0])
    return chr(int(code, 16))  # raises ValueError beyond Unicode
