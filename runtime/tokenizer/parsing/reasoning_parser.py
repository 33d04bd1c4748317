"""Separates the reasoning between <think> tags at the start of a reply from its content, while it streams."""

from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Part:
    """A part of a reply; the tags belong to the reasoning. All parts joined are the reply."""

    text: str
    reasoning: bool


class ReasoningParser:
    """Splits a streamed reply into parts. A tag later than the start of the reply is content."""

    def __init__(self, prompt_end: str = "") -> None:
        """prompt_end: the end of the prompt, where some templates write the opening tag."""
        self._state: Literal["before", "inside", "after"] = "inside" if prompt_end.rstrip().endswith(OPEN) else "before"
        self._held = ""  # a possible start of a tag

    @property
    def inside(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> list[Part]:
        if self._state == "after":
            return [Part(text, False)] if text else []
        text, self._held = self._held + text, ""
        if self._state == "before":
            start = text.lstrip()
            if not start.startswith(OPEN):
                if OPEN.startswith(start):  # also for an empty text
                    self._held = text
                    return []
                self._state = "after"
                return [Part(text, False)]
            self._state = "inside"
        end = text.find(CLOSE)
        if end >= 0:
            self._state = "after"
            parts = [Part(text[: end + len(CLOSE)], True), Part(text[end + len(CLOSE) :], False)]
            return [part for part in parts if part.text]
        held = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - held :]
        decided = text[: len(text) - held]
        return [Part(decided, True)] if decided else []

    def flush(self) -> list[Part]:
        rest, self._held = self._held, ""
        return [Part(rest, self.inside)] if rest else []
