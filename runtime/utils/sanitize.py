"""Makes text from models, files and servers safe to print.

Model output can contain escape sequences that retitle the window or set the clipboard, and a file name can
contain a newline that forges a log line.
"""

import re

# C0 without \n and \t, DEL, C1; line and paragraph separators; bidirectional overrides and isolates; tag characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\ud800-\udfff]"
)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return "^" + chr(code + 0x40)
    if code == 0x7F:
        return "^?"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def sanitize(text: str) -> str:
    """Return `text` with control and bidirectional characters escaped; newlines and tabs stay."""
    return _UNSAFE.sub(_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    return "".join(f"\\u{int.from_bytes(unit, 'big'):04x}" for unit in _utf16(match[0]))


def _utf16(character: str) -> list[bytes]:
    data = character.encode("utf-16-be", "surrogatepass")
    return [data[at : at + 2] for at in range(0, len(data), 2)]


def sanitize_json(line: str) -> str:
    """Return JSON text in which control and bidirectional characters are escape sequences: the same value."""
    return _UNSAFE.sub(_json_escape, line)


def one_line(text: str, limit: int = 500) -> str:
    """Return `text` sanitized, without newlines or tabs, cut to `limit` characters: for names inside a message."""
    clean = sanitize(text).replace("\n", "\\n").replace("\t", "\\t")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
