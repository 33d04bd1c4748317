"""Translates regular expressions of ECMAScript and Python to the syntax of Rust, which the grammar compiler reads."""

import re
from collections.abc import Iterator

_SURROGATES = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_ESCAPE = r"\\c[A-Za-z]|\\[pPux]\{[^}]*\}|\\."
_OUTSIDE = re.compile(_ESCAPE + r"|\(\?<?[=!]|\{\d*,?\d*\}|\[\^?|.", re.DOTALL)
_INSIDE = re.compile(_ESCAPE + r"|\[:\^?[a-z]+:\]|.", re.DOTALL)
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9kbB]")
_CLASS = re.compile(r"\\[dDsSwWpP]")  # next to one a "-" is no range
# "{" is a literal where no quantifier follows; "{,3}" is a quantifier in Python only.
_BRACES = ((re.compile(r"\{\d+(,\d*)?\}"), "{"), (re.compile(r"\{,\d+\}"), "{0"), (re.compile(r"\{"), r"\{"))
_ESCAPES = {r"\<": "<", r"\>": ">", r"\Z": r"\z", r"\0": r"\x00"}
# Inside a class these begin set operations in Rust, and are literals elsewhere; \b is a backspace.
_CLASS_ESCAPES = {**_ESCAPES, "[": r"\[", "&": r"\&", "~": r"\~", r"\b": r"\x08"}


def rust_pattern(pattern: str) -> str:
    """Return an equal expression in Rust's syntax. Raises ValueError for look-around and back-references."""
    return "".join(_parts(_SURROGATES.sub(_character, pattern)))


def _character(pair: re.Match[str]) -> str:
    high, low = (int(part, 16) for part in pair.groups())
    return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):x}}}"


def _parts(pattern: str) -> Iterator[str]:
    at, begin, inside, token = 0, 0, False, ""
    while at < len(pattern):
        match = (_INSIDE if inside else _OUTSIDE).match(pattern, at)
        assert match is not None
        before, token, at = token, match[0], match.end()
        if token[:2] == r"\c":
            yield f"\\x{ord(token[-1]) % 32:02x}"
        elif inside:
            first = at == begin + 1
            inside = token != "]" or first
            no_range = token == "-" and (before == "-" or _CLASS.match(before) or _CLASS.match(pattern, at))
            yield "\\" + token if no_range or (first and token in "-]") else _CLASS_ESCAPES.get(token, token)
        elif token == "[^" and pattern[at : at + 1] == "]" and "]" not in pattern[at + 1 :]:
            at += 1
            yield r"[\s\S]"  # ECMAScript's [^]
        elif _NOT_REGULAR.fullmatch(token):
            raise ValueError("look-around and back-references are not supported")
        elif token[0] == "{":
            head = next(head for form, head in _BRACES if form.match(token))
            yield head + token[1:]
        else:
            inside, begin = token[0] == "[", at
            # In strings, a class with all control characters has the escapes of quotes and backslashes, too.
            yield r"[^\x00" if token == "[^" else _ESCAPES.get(token, token)
