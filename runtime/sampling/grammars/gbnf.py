"""Converts GBNF, the grammar format of llama.cpp and XGrammar, to Lark."""

import re
from collections.abc import Iterable, Iterator

from llguidance.gbnf_to_lark import gbnf_to_lark

_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]?start\s*:(?!:=))")
_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*]|#[^\r\n]*|[\w-]+|.', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)|[&~]", re.DOTALL)
_REPEATS = ("*", "+", "?", "}")
_BRACKETS = {r"\[": "[", r"\]": "]"}  # escaped in a class only
_ANY = f"[\\x00-{chr(0x10FFFF)}]"  # Lark's "." leaves out line feeds


def lark_grammar(text: str) -> str:
    """Return the grammar in Lark's syntax, unchanged if it is Lark. The errors of a damaged one have many types."""
    if _LARK.search(text):
        return text
    return gbnf_to_lark("".join(_converted(_PART.findall(text))))


def _converted(parts: Iterable[str]) -> Iterator[str]:
    before = ""
    for part in parts:
        # The converter drops the parentheses of ("a"*)?, unless something else is in them.
        yield '"")' if part == ")" and before in _REPEATS else _part(part)
        before = before if part.isspace() else part


def _part(part: str) -> str:
    # The converter leaves the zeros out of \u00e9, and takes a rule called "start" for Lark's first one.
    if part[0] == "[":
        return _ESCAPE.sub(_character, part)
    if part[0] == '"':
        return _ESCAPE.sub(lambda escape: _BRACKETS.get(escape[0]) or _character(escape), part)
    if part[0] == "#":
        return ""
    return {".": _ANY, "start": "start-rule"}.get(part, part)


def _character(escape: re.Match[str]) -> str:
    digits = next(filter(None, escape.groups()), None)
    if digits is None:
        # Doubled in a class, these are a set operation in Lark; llama.cpp writes \- for a schema.
        return {"&": r"\x26", "~": r"\x7e", r"\-": r"\x2d"}.get(escape[0], escape[0])
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 128 else escape[0] if 0xD800 <= code < 0xE000 else chr(code)
