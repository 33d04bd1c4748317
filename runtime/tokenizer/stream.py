"""Streaming text: complete characters from token bytes (StreamDecoder), stop strings across tokens (StopMatcher).

Streamed text plus `flush` equals `Tokenizer.decode` of all ids, which uses the same decoder. Control characters pass
through; the printer escapes them.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from mycli.runtime.errors import UsageError

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


class TokenPieces(Protocol):
    @property
    def strip_spaces(self) -> int:
        """Number of spaces removed from the start of a text."""
        ...

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """Return the bytes of a token, None for one without text."""
        ...


class StreamDecoder:
    """Decodes token ids to text with constant work per token.

    Bytes of an incomplete character are held back; each ill-formed sequence becomes one U+FFFD.
    """

    def __init__(self, pieces: TokenPieces, before: Sequence[int] = ()) -> None:
        """before: the text that is continued. SentencePiece's space is removed only where a text begins."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not any(pieces.piece(token_id, first=False) for token_id in before)
        self._strip = pieces.strip_spaces if self._first else 0

    def feed(self, token_id: int) -> str:
        """Return the characters completed by one more token, often none."""
        data = self._pieces.piece(token_id, self._first)
        if data is None:
            return ""
        self._first = False
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data = data[1:]
            self._strip -= 1
        return self._decoder.decode(data)

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._first, self._strip = True, self._pieces.strip_spaces
        return rest


class StopMatcher:
    """Finds the stop string completed first; of two completed together, the longer."""

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise UsageError(f"{len(stops)} stop strings", f"at most {MAX_STOPS}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise UsageError(f"a stop string of {len(stop)} characters", f"1 to {MAX_STOP_LENGTH} characters")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text before any stop string, and whether one was found; after that, no more text."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            _, start, self.matched = min(matches)
            return text[:start], True
        # Text that may be the start of a stop string is held back.
        pending = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - pending :]
        return text[: len(text) - pending], False

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        # Length of the longest suffix of `text` that is a prefix of `stop`.
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
