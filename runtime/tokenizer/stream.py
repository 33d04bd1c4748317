"""Text as it is generated: whole characters only (StreamDecoder), and stop strings found across tokens (StopMatcher).

Knows bytes and characters. Does not know models or terminals: control characters pass through, the printer cleans them.
Streamed text, with the flush, is exactly `Tokenizer.decode` of all ids, which is built on the same decoder.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from mycli.runtime.errors import UsageError

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


class Pieces(Protocol):
    """What a stream needs of a tokenizer."""

    @property
    def strip_spaces(self) -> int:
        """How many spaces the start of a text loses."""
        ...

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """The bytes of a token, None for one that shows nothing."""
        ...


class StreamDecoder:
    """Ids in, text out, constant work per token.

    Bytes that may still become a character are held back, so U+FFFD appears only for bytes that can no longer be part
    of one: one for each ill-formed sequence, and one for a character left unfinished at the end (`flush`).
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._strip = pieces.strip_spaces

    def feed(self, token_id: int) -> str:
        """The characters completed by one more token, often none."""
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
        """What was held back; the decoder is then ready for another text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._first, self._strip = True, self._pieces.strip_spaces
        return rest


class StopMatcher:
    """Finds the stop string that is completed first, however the text is cut into pieces.

    Of two completed by the same character the longer counts. Text that may be the beginning of a stop is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """At most 16 non-empty stops of at most 256 characters; otherwise UsageError."""
        if len(stops) > MAX_STOPS:
            raise UsageError(f"{len(stops)} stop strings", f"at most {MAX_STOPS}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise UsageError(f"a stop string of {len(stop)} characters", f"1 to {MAX_STOP_LENGTH} characters")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certainly before any stop, and whether a stop was found; after that, nothing more."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            _, start, self.matched = min(found)
            return text[:start], True
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
