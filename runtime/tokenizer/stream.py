"""Streaming text: complete characters from token bytes (StreamDecoder), stop strings across tokens (StopMatcher).

Streamed text plus `flush` equals `Tokenizer.decode` of all ids, which uses the same decoder. Control characters pass
through; the printer escapes them.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mycli.runtime.errors import UsageError

MAX_STOPS = 64  # group chats stop at the name of every character
MAX_STOP_LENGTH = 256


@dataclass(frozen=True)
class TextRules:
    """The rules for the text of a reply.

    stops: the text ends before the first of these strings, or with it (`include_stop`), unless it is completed by the
    first `min_tokens` tokens; show_control: control tokens that no parser reads are text.
    """

    stops: Sequence[str] = ()
    min_tokens: int = 0
    include_stop: bool = False
    show_control: bool = False


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


class _Progress:
    # How much of `stop` the text ends with, by the method of Knuth, Morris and Pratt: two steps per character at most
    # on average, whatever stop strings and texts a client chooses.

    def __init__(self, stop: str) -> None:
        self.stop, self.length = stop, 0
        self._shorter = [0]  # [n]: the longest shorter beginning of `stop` with which its first n + 1 characters end
        length = 0
        for character in stop[1:]:
            length = self._extended(length, character)
            self._shorter.append(length)

    def _extended(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == character)

    def completed_by(self, character: str) -> bool:
        """Advance by one character of the text."""
        self.length = self._extended(self.length, character)
        return self.length == len(self.stop)

    def drop(self) -> None:
        """Treat a complete stop string as text; its end may be the start of another one."""
        self.length = self._shorter[self.length - 1]


class StopMatcher:
    """Finds the stop string completed first; of two completed together, the longer."""

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """included: the text ends with the stop string, not before it. Raises UsageError."""
        if len(stops) > MAX_STOPS:
            raise UsageError(f"{len(stops)} stop strings", f"at most {MAX_STOPS}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise UsageError(f"a stop string of {len(stop)} characters", f"1 to {MAX_STOP_LENGTH} characters")
        self._stops = [_Progress(stop) for stop in stops]
        self._included = included
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def feed(self, text: str, ends: bool = True) -> tuple[str, bool]:
        """Return the text up to any stop string, and whether one was found; after that, no more text.

        ends: a stop string that `text` completes ends the reply; otherwise it is part of the text.
        """
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        before = len(self._held)
        text = self._held + text
        for end in range(before + 1, len(text) + 1):
            completed = [progress for progress in self._stops if progress.completed_by(text[end - 1])]
            if completed and ends:
                self._held = ""
                self.matched = max((progress.stop for progress in completed), key=len)
                return text[: end if self._included else end - len(self.matched)], True
            for progress in completed:
                progress.drop()
        # Text that may be the start of a stop string is held back.
        pending = max(progress.length for progress in self._stops)
        self._held = text[len(text) - pending :]
        return text[: len(text) - pending], False

    def flush(self) -> str:
        rest, self._held = self._held, ""
        for progress in self._stops:
            progress.length = 0
        return rest
