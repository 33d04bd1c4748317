"""Makes text from models, files and servers safe to show on a terminal or in a log.

A model can be talked into writing escape sequences that retitle the window, set the clipboard or fake a prompt; a file
name can hold a newline that forges a log line. Knows code points, nothing of where the text comes from or goes.
"""

import re

# C0 without \n and \t, DEL, C1; line and paragraph separators; bidirectional overrides and isolates; tag characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\ud800-\udfff]"
)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return "^" + chr(code + 0x40)
    if code == 0x7F:
        return "^?"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def sanitize(text: str) -> str:
    """`text` with every character that could act on a terminal made visible; newline and tab stay."""
    return _UNSAFE.sub(_visible, text)


def one_line(text: str, limit: int = 500) -> str:
    """`sanitize`, and no newline or tab either, cut to `limit` characters: for names inside a message."""
    clean = sanitize(text).replace("\n", "\\n").replace("\t", "\\t")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
